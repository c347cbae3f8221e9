"""Chat templates: a conversation -> the text that the model reads, and which parts of it the model has to learn to write.

A chat template is the Jinja program that comes with a tokenizer (`chat_template.jinja`, or the entry of that name in
`tokenizer_config.json`); https://huggingface.co/docs/transformers/chat_templating describes what it is given. It is run
in Jinja's sandbox. It is not given `strftime_now`: what is prepared must not depend on the day on which that is done.

An answer is what the model writes after the generation prompt: the assistant's content, what the template puts in front
of it after the generation prompt, and what it puts behind it, such as the token that ends the turn. Where that lies in the
text is found by rendering the conversation a second time with another content in its place, so that templates need no
`{% generation %}` marks, and may trim or rearrange what they are given.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slurmtrain.choices import LossOn
from slurmtrain.data.format.manifest import ChatFacts
from slurmtrain.data.format.tokenizers import NO_TOKEN, Spans, TokenizerChoice
from slurmtrain.data.prepare.conversation import ASSISTANT, BadRecord, Conversation
from slurmtrain.errors import ConfigError

CHATML = "chatml"
# For templates without a form for them, which would leave them out.
_REFUSE_TOOLS = (
    "{% if tools or message.tool_calls or message.content is not string %}{{ raise_exception('it has tools, calls them, or "
    "has a content that is no text: it needs the chat template of a model') }}{% endif %}"
)
# https://github.com/openai/openai-python/blob/v0.28.1/chatml.md
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    + _REFUSE_TOOLS
    + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = {  # by their names in prepare.chat_template
    CHATML: CHATML_TEMPLATE,
    # questions and answers end to end
    NO_TOKEN: "{% for message in messages %}" + _REFUSE_TOOLS + "{{ message.content }}{% endfor %}",
}
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLACEHOLDER = "\ue000slurmtrain\ue001"  # private characters, which no text that people write has


@dataclass(frozen=True)
class RenderedText:
    """A text, and the parts of it that count as targets; None for all of a text that is no conversation."""

    text: str
    spans: Spans | None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with all that it is given, as plain values, so that processes can be handed it.

    Attributes:
        source: the Jinja program.
        tokens: name and text of each of NAMED_TOKENS that the tokenizer has.
        loss_on: which parts count.
    """

    source: str
    tokens: tuple[tuple[str, str], ...]
    loss_on: LossOn

    @property
    def facts(self) -> ChatFacts:
        """What identifies the template in a manifest."""
        return ChatFacts(hashlib.sha256(self.source.encode()).hexdigest(), str(self.loss_on))

    def render(self, conversation: Conversation) -> RenderedText | BadRecord:
        """Return the text of a conversation and the parts that count, or why the template refuses it."""
        try:
            chat = self._rendered(conversation)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            return BadRecord(f"the chat template refuses it: {str(error) or type(error).__name__}")
        try:
            chat.text.encode()
        except UnicodeEncodeError:
            return BadRecord("invalid Unicode (half of a surrogate pair)")
        return chat if chat.spans else BadRecord("the chat template leaves nothing of the answer")

    def _rendered(self, conversation: Conversation) -> RenderedText:
        text = self._run(conversation.messages, conversation.tools)
        if self.loss_on == LossOn.ALL:
            return RenderedText(text, _non_empty([(0, len(text))]))
        answers = conversation.answers()
        spans: list[tuple[int, int]] = []
        for index in answers[-1:] if self.loss_on == LossOn.LAST_ANSWER else answers:
            floor = spans[-1][1] if spans else 0
            content = self._content_span(conversation, index, text)
            if content is None:
                spans.append(self._turn_span(conversation, index, text, floor))
            else:
                begin, end = content
                end += len(next(filter(text[end:].startswith, self._endings(conversation, index)), ""))
                spans.append((self._after_generation_prompt(text, floor, begin), end))
        return RenderedText(text, _non_empty(spans))

    def _endings(self, conversation: Conversation, index: int) -> Iterator[str]:
        """Yield what may stand behind the content of message `index`, of which the first that does belongs to its turn.

        That is what the template puts there when the conversation ends with that message, calls of tools among it, or with
        another answer. Some end the whole conversation with one more token, which stands behind the last answer alone
        (Phi-3): then it is the first word.
        """
        if conversation.messages[index].get("tool_calls") and (calls := self._ending(conversation, index)):
            yield calls
        if words := (ending := _end_of_answer(self)).split():
            yield ending
            yield ending[: ending.find(words[0]) + len(words[0])]

    def _ending(self, conversation: Conversation, index: int) -> str:
        """Return what stands behind the content of message `index` if it is the last one, without white space at the end."""
        until = Conversation(conversation.messages[: index + 1], conversation.tools)
        try:
            text = self._run(until.messages, until.tools)
            content = self._content_span(until, index, text)
        except jinja2.TemplateError:  # some refuse a conversation that ends so
            return ""
        return text[content[1] :].rstrip() if content is not None else ""

    def _content_span(self, conversation: Conversation, index: int, text: str) -> tuple[int, int] | None:
        """Return where the content of message `index` lies in the rendered text; None: the template leaves it out."""
        messages = list(conversation.messages)
        messages[index] = {**messages[index], "content": PLACEHOLDER}
        other = self._run(messages, conversation.tools)
        if other == text:
            return None
        begin = _shared_length(text, other)
        return begin, len(text) - _shared_length(text[begin:][::-1], other[begin:][::-1])

    def _turn_span(self, conversation: Conversation, index: int, text: str, floor: int) -> tuple[int, int]:
        """Return where message `index`, whose content the template leaves out, lies in the rendered text after `floor`.

        Llama 3.1 and Mistral write calls of tools so. Where the message begins is found by rendering another in its place.
        """
        before = list(conversation.messages[:index])
        with_turn = self._run([*before, conversation.messages[index]], conversation.tools)
        other = self._run([*before, {"role": ASSISTANT, "content": PLACEHOLDER}], conversation.tools)
        place = _shared_length(with_turn, other)
        turn = with_turn[place:].rstrip()
        # Where it is then, unless what is before it has changed: a call may have been made before in the same words.
        begin = place if text.startswith(turn, place) else text.find(turn, floor)
        if begin < 0:
            raise ValueError(f"what it makes of messages[{index}] depends on those after it")
        return begin, begin + len(turn)

    def _after_generation_prompt(self, text: str, floor: int, begin: int) -> int:
        """Return where the model begins to write: after the last generation prompt before `begin`, if there is one."""
        prompt = _generation_prompt(self)
        place = text.rfind(prompt, floor, begin) if prompt else -1
        if place >= 0:
            return place + len(prompt)
        # Without one, as in Mistral's, the model writes the space before its answer, too, which its first token has.
        return max(floor, len(text[:begin].rstrip(" ")))

    def _run(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **more: Any) -> str:
        return _compiled(self.source).render(
            messages=list(messages),
            tools=tools,
            documents=None,
            **{"add_generation_prompt": False, **dict(self.tokens), **more},
        )


def load_chat_template(choice: TokenizerChoice, given: str | None, loss_on: LossOn) -> ChatTemplate:
    """Return the chat template that the user has given, or the tokenizer's own.

    Args:
        choice: the tokenizer, beside whose file its own template lies.
        given: path of a Jinja file, "chatml", or "none"; None: the tokenizer's own.

    Raises:
        ConfigError: there is no such file, the tokenizer has no template, or it is no Jinja program.
    """
    folder = Path(choice.name).parent
    try:
        settings = json.loads(_read(folder / TOKENIZER_CONFIG) or b"{}")
    except ValueError as error:
        raise ConfigError(f"{folder / TOKENIZER_CONFIG} is not valid JSON: {error}") from None
    # Older versions of transformers write a token as an object.
    named = {name: settings.get(name) for name in NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    tokens = tuple((name, text) for name, text in texts.items() if isinstance(text, str))
    source = _source(choice, given, folder, settings)
    template = ChatTemplate(source, tokens, loss_on)
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {choice.name} is not a valid Jinja template: {error}") from None
    return template


def files_beside(choice: TokenizerChoice) -> dict[str, bytes]:
    """Return the settings that lie beside a tokenizer.json, by file name: those that others need to load the tokenizer."""
    folder = Path(choice.name).parent
    names = (TOKENIZER_CONFIG, "special_tokens_map.json") if choice.name.endswith(".json") else ()
    return {name: content for name in names if (content := _read(folder / name)) is not None}


def _source(choice: TokenizerChoice, given: str | None, folder: Path, settings: Mapping[str, Any]) -> str:
    if given in PLAIN:
        return PLAIN[given]
    if given is not None:
        content = _read(Path(given))
        if content is None:
            raise ConfigError(
                f"prepare.chat_template={given} cannot be read",
                hint=f"the path of a Jinja file, {CHATML}, or {NO_TOKEN}: questions and answers concatenated",
            )
        return content.decode()
    content = _read(folder / TEMPLATE_FILE) if choice.name.endswith(".json") else None
    if content is not None:
        return content.decode()
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    if isinstance(found, str):
        return found
    raise ConfigError(
        f"the tokenizer {choice.name} has no chat template: there is no {TEMPLATE_FILE} and no entry chat_template in "
        f"{TOKENIZER_CONFIG} next to it",
        hint=f"set prepare.chat_template to a Jinja file, to {CHATML}, or to {NO_TOKEN} (concatenates question and answer)",
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _shared_length(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    while (
        low < high
    ):  # by halves: one character after another takes 20 times as long as all the rest of a long conversation
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _non_empty(spans: Sequence[tuple[int, int]]) -> Spans:
    return tuple((begin, end) for begin, end in spans if begin < end)


@functools.lru_cache(maxsize=8)
def _generation_prompt(template: ChatTemplate) -> str:
    """Return what the template puts before an answer that is to be written."""
    question = [{"role": "user", "content": "?"}]
    try:
        with_prompt, without = template._run(question, None, add_generation_prompt=True), template._run(question, None)
    except jinja2.TemplateError:
        return ""
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


@functools.lru_cache(maxsize=8)
def _end_of_answer(template: ChatTemplate) -> str:
    """Return what the template puts behind the answer to a single question."""
    turns = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}
    return template._ending(Conversation(turns), 1)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, by which some templates mark what the assistant says: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
