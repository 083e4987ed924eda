#!/usr/bin/env bash
# The main job, end to end: one process reads the story and keeps a quarter of its KV cache,
# another one opens the small file and answers from it, without the story.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

say() { printf '\n$ %s\n' "$*"; }

cp "$here/dark-lamp.md" "$work/"
cd "$work"

say dropkv compress dark-lamp.md -o dark-lamp.kv --budget 0.25
dropkv compress dark-lamp.md -o dark-lamp.kv --budget 0.25 --dtype float32 --device cpu

say dropkv info dark-lamp.kv
dropkv info dark-lamp.kv

rm dark-lamp.md # from here on there is only the file
say dropkv query dark-lamp.kv QUESTION QUESTION QUESTION
dropkv query dark-lamp.kv --dtype float32 --device cpu --max-new-tokens 40 \
    "What is the name of the murderer?" \
    "What is the place where the captain was killed?" \
    "How long was the lamp dark?"
