"""Does speculation pay? Costs of the two ways to decode, the value of an acceptance length, its tail, a verdict.

Everything here is arithmetic: no clock, no files, no settings. Times come in as measurements, acceptance as sums that
were replayed. A figure carries its interval; where the data allow none it is None and never a guess, and whatever was
read outside the measured range says so.
"""
