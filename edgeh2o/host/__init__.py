"""The machine that a process runs on: memory, processors, limits."""
