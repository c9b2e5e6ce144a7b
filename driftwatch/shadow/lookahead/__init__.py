"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): what a team would have without a trained draft.

This is a run of its own, not a replay: the target decodes a small share of the prompts again, greedily, so its figures
are an offline estimate and are never pooled with a replay of served tokens.

Every step is one pass of the target over a tree of tokens that hangs on the last emitted one:

- the lookahead branch, a window of W columns by N - 1 rows, each row what the pass before made of the one above: a
  token sees the columns before its own in the oldest row, and the rows above it in its own column (the paper's figure
  2); a column and its new token are an N-gram, kept in a pool under its first token, the G latest for each;
- the verification branch, the pool's N-grams (G at most) that begin with the last emitted token: of the one that the
  target's own choices follow furthest, the matching part is accepted, and the target's next choice comes on top.

Where the paper leaves a choice, it is that of its authors' code (hao-ai-lab/LookaheadDecoding): the oldest row begins
as random tokens of the prompt, the window moves by one column a step, and ``prompt=1`` puts the N-grams of prompt and
output into the pool too. Unlike there, guesses from the prompt are tried before the window is full.

The output is the target's own greedy output, token for token, but for numeric noise: a pass over many tokens rounds
differently from a pass over one, which in a half precision can turn a near-tie of the two best logits. In float32 and
float64 no difference was seen.
"""
