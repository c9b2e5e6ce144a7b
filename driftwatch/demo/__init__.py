"""The demo: a small real target, a draft made for one kind of traffic, and prompts of two kinds."""
