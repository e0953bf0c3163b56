"""Sparse attention as the user sees it: one algorithm, one file, one frozen dataclass of settings.

The classes describe an algorithm and check its settings; the work is done by a policy of the
compiled core, which ``make_policy`` makes.
"""
