"""Control: takes samples in, judges cells, keeps the schedules, tells people and machines."""
