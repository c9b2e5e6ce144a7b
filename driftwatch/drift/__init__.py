"""Has acceptance changed? Sums with honest intervals, baselines, a sequential test with a promised false-alarm rate.

Everything here is arithmetic on plain state: no clock, no files, no settings. Callers pass times and indices in, and
every state object round-trips through JSON exactly, so that a restart continues bit for bit.
"""
