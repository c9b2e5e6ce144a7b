"""``python -m driftwatch.settings`` prints the README's table."""

from driftwatch.settings.table import reference

print(reference())
