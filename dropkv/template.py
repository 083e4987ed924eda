"""What a chat template writes around a document and a question, and the proof that it only wraps the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dropkv.errors import ModelError

PINNED_DAY = "2024-07-26"  # the day Llama-3.1's template prints by itself
DAY_ARGUMENT = "strftime_now"
MARKERS = ("Quicksilver 4711", "Nightingale 0815", "Evergreen 3142")
PROBES = (
    "One line.\n\nA  second\tparagraph,  spaced\n\n\n# heading\n- item\n    indented",
    "# Heading first, 'single' \"double\" `back` \\n \\\\ 100% <html>&amp;</html>",
    "Braces {{ messages }} {% if x %} {# y #} ${z} {'role': 'user'}",
    "Marks <|im_end|> <|eot_id|> [INST] [/INST] </s> <think> </think> <end_of_turn> <|end|>",
    "\u00dcn\u00efc\u00f6de \u2014 \u6f22\u5b57 \U0001f600 UPPER lower \u00a0 end",
    "long " * 3000 + "end",
    " \n outer white space \n ",
)


@dataclass(frozen=True)
class Pieces:
    """Texts around what users write: head DOCUMENT opening QUESTION after ANSWER between QUESTION last ANSWER.

    between and last are None when the template has no place for a second question. space: white space between `after` and an answer,
    which the model writes itself, and the template for answers that were given before.
    """

    head: str
    opening: str
    after: str
    between: str | None
    last: str | None
    space: str = ""


PLAIN = Pieces("", "\n\nQuestion: ", "\nAnswer:", "\n\nQuestion: ", "\nAnswer:", " ")  # for models without a template


class Template:
    """The chat template of a tokenizer with fixed arguments and system text."""

    def __init__(self, tokenizer: Any, source: str, arguments: dict[str, Any], system: str | None, name: str) -> None:
        self.tokenizer = tokenizer
        self.arguments = {key: value for key, value in arguments.items() if key != DAY_ARGUMENT}
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.name = name
        self.source = _pin_day(source, arguments.get(DAY_ARGUMENT, PINNED_DAY), name)

    def pieces(self) -> Pieces:
        """Render once for the pieces, then check that every probe comes out as head + text + after."""
        marker = MARKERS[0]
        rendered = self._first_turn(marker)
        if rendered.count(marker) != 1:
            raise self._rewrites("repeats or changes the user's text")
        head, _, after = rendered.partition(marker)
        system = self.system[0]["content"].strip() if self.system else ""
        if system not in head + after:
            raise ModelError(
                f"{self.name}: its chat template drops the system text; leave --system out, or put it into the document"
            )
        if self._first_turn(marker) != rendered:
            raise self._rewrites("renders differently from one time to the next")
        for probe in PROBES:
            trimmed = {head + text + after for text in (probe, probe.strip(), probe.lstrip(), probe.rstrip())}
            if self._first_turn(probe) not in trimmed:
                raise self._rewrites(f"does more than trim the user's text (seen with {probe.strip()[:24]!r}...)")
        return Pieces(head, "\n\n", after, *self._second_turn(head, after))

    def _first_turn(self, text: str) -> str:
        try:
            return self._render([*self.system, {"role": "user", "content": text}])
        except Exception as error:  # a template is foreign code and raises what it likes
            if self.system and self._works_without_system(text):
                raise ModelError(
                    f"{self.name}: its chat template takes no system text; leave --system out, or put it "
                    f"into the document"
                ) from error
            raise ModelError(
                f"{self.name}: its chat template fails ({_first_line(error)}); use another model"
            ) from error

    def _works_without_system(self, text: str) -> bool:
        try:
            self._render([{"role": "user", "content": text}])
        except Exception:
            return False
        return True

    def _second_turn(self, head: str, after: str) -> tuple[str | None, str | None, str]:
        """between, last and space."""
        first, answer, second = MARKERS
        turns = [("user", first), ("assistant", answer), ("user", second)]
        messages = [{"role": role, "content": text} for role, text in turns]
        # Some templates move the system text to the last question: it must not come twice.
        for system in [self.system, []] if self.system else [[]]:
            try:
                rendered = self._render([*system, *messages])
            except Exception:
                continue
            if any(rendered.count(marker) != 1 for marker in MARKERS):
                continue
            before, _, rest = rendered.partition(first)
            written, _, rest = rest.partition(answer)
            between = rest.partition(second)
            if before == head or system is not self.system or not self.system:
                space = written[len(after) :] if written.startswith(after) else ""
                return between[0], between[2], "" if space.strip() else space
        return None, None, ""

    def _render(self, messages: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.source, tokenize=False, add_generation_prompt=True, **self.arguments
        )
        return str(text)

    def _rewrites(self, what: str) -> ModelError:
        return ModelError(
            f"{self.name}: its chat template {what}, so the document would not be what the model reads; "
            f"use another model"
        )


def template_source(tokenizer: Any) -> str | None:
    """The Jinja text of a tokenizer's chat template (the one named default of several), or None."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    return found or None


def default_arguments(source: str) -> dict[str, Any]:
    """Arguments that a template should be given: no thinking before answers, and a day that does not change."""
    arguments: dict[str, Any] = {}
    if "enable_thinking" in source:
        arguments["enable_thinking"] = False
    if "strftime_now" in source:
        arguments[DAY_ARGUMENT] = PINNED_DAY
    return arguments


def _pin_day(source: str, day: object, name: str) -> str:
    """The template with today replaced by `day` (YYYY-MM-DD): a macro of the same name in front of it, one text per
    format it asks for.
    """
    if not re.search(r"strftime_now\s*\(", source):
        return source
    from datetime import date

    formats = re.findall(r"strftime_now\s*\(\s*(['\"])(.*?)\1\s*\)", source)
    if len(formats) != len(re.findall(r"strftime_now\s*\(", source)):
        raise ModelError(
            f"{name}: its chat template writes the time in a way that cannot be fixed to one day; use another model"
        )
    try:
        fixed = date.fromisoformat(str(day))
    except ValueError:
        raise ModelError(
            f"{name}: its chat template writes the day, and {day!r} is none; give strftime_now as YYYY-MM-DD"
        ) from None
    table = ", ".join(
        f"{spelling!r}: {fixed.strftime(spelling)!r}" for spelling in sorted({found for _, found in formats})
    )
    return f"{{%- macro strftime_now(spelling) -%}}{{{{ {{{table}}}[spelling] }}}}{{%- endmacro -%}}{source}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
