"""The command line: one module per verb. Answers go to stdout, everything else to stderr."""
