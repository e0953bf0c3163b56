"""The generation loop, its sampler, statistics, and what the machine has to offer."""
