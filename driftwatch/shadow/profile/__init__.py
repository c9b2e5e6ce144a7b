"""What one pass of a target and of a draft takes on this device, measured while they decode."""
