"""What sparse prefill costs in quality and saves in time, on the user's own model and text."""
