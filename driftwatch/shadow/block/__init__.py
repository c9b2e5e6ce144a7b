"""Drafts that read a target's hidden states and propose by blocks, in parallel or by a native head: DFlash, Domino,
P-EAGLE, MTP. One module each; ``replay`` judges what they propose."""
