"""Many requests on one copy of the weights, and the HTTP interface to them."""
