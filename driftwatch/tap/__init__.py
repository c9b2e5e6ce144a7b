"""The tap: in the request path, in front of the engine. No torch, no database; it fails open."""
