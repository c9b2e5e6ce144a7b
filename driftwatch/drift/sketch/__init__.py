"""A sketch of the data that a draft was trained on: is a prompt like those, or off their distribution?"""
