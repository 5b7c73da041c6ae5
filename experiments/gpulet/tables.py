"""A cast as the published program takes it (ALGORITHMS 1.3, 1.4, 1.10; its files of input).

What it knows of its own models only, the time to assemble a batch and the bytes of an input, is 0 for measured ones:
it belongs to its authors' server and network. It takes utilisation to go with the share, so constants are fitted that
way to the pairs that were measured.
"""
