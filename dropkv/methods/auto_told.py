"""The recipe for questions that nobody has asked yet (docs/question-free.md): `auto` with c_j from all layers, whose queries weigh what the
document's own words do not tell: every replayed query counts by the nats of the token it predicts.

A plain reading first gives the nats of every document token, -ln of what the model gives it after those before it. A replay's query weighs the
nats of the token that comes next in its chunk; the instruction and a chunk's last token weigh 0. x_hj is then the largest of any query's step
times its weight, and p_hj the largest p times weight; sums of steps are not weighed, and 30 % of each head's budget (--alpha) goes by them. The
rest is shared among 40 % of the heads. What a copying head does for words that could be guessed counts little.

The document is read three times and replayed twice: plainly, with the model's head (2 x vocabulary x width operations a token); with replays for
p_hj alone, of which c_j is made; with replays again, for what is kept.
"""

from dataclasses import replace

from dropkv.methods._base import LARGEST_P_TOLD, SUM_OF_STEPS, Together, told_step
from dropkv.methods.auto import METHOD as ONCE

METHOD = replace(
    ONCE,
    name="auto-told",
    summary="auto-twice, queries weigh what the document does not tell",
    observed=told_step,
    beside=(LARGEST_P_TOLD, SUM_OF_STEPS),
    together=Together(heads=0.4, scope="model"),
    needs=frozenset({"words", "told", "replay"}),
)
