"""Chat data: the tokens are those that the tokenizer's own chat template gives, and only what the assistant says counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slurmtrain.choices import LossOn, RecordKind
from slurmtrain.data.format.manifest import Manifest, read_manifest, shard_file
from slurmtrain.data.format.tokenizers import TokenizerChoice
from slurmtrain.data.prepare.chat_template import CHATML_TEMPLATE, ChatTemplate, RenderedText
from slurmtrain.data.prepare.conversation import Conversation
from slurmtrain.data.sources.prepared import PreparedText
from slurmtrain.errors import ConfigError
from tests.unit.data.test_prepare import prepare as prepare_all

# In the manner of Llama 3.1: trims, has a begin token, asks for the date, and writes calls of tools in the content's place.
CALLS = "{{ {'name': call.name} | tojson }}"
LLAMA = (
    "{{ bos_token }}{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{%- endif %}"
    "{%- for message in messages %}{{ '<|start|>' + message['role'] + '<|close|>\n\n' }}"
    "{%- if 'tool_calls' in message %}{% set call = message.tool_calls[0] %}" + CALLS + "{%- else %}"
    "{{ message['content'] | trim }}{%- endif %}<|eot|>{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant<|close|>\n\n' }}{%- endif %}"
)
# In the manner of Qwen 3: only the last answer keeps what the assistant has thought, and tools are told as JSON.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- content.split('</think>')[-1].lstrip('\n') if content else '' }}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.name + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# In the manner of Mistral: no generation prompt, roles that must alternate, marks of the answers, and calls in their place.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ('user', 'assistant') and message.tool_calls is not defined %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endif %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]"
    "{% elif message.tool_calls is defined %}[CALLS] [{% set call = message.tool_calls[0] %}"
    + CALLS
    + "]{{ eos_token }}"
    "{% elif message['role'] == 'tool' %}[RESULT] {{ message['content'] }}[/RESULT]"
    "{% else %}{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
ENDS = {"chatml": "<|im_end|>", "llama": "<|eot|>", "qwen": "<|im_end|>", "mistral": "</s>"}  # of an answer
TEMPLATES = {"chatml": CHATML_TEMPLATE, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}
# As older versions of transformers write a special token.
END = {"__type": "AddedToken", "content": "</s>"} | dict.fromkeys(
    ("lstrip", "normalized", "rstrip", "single_word"), False
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|close|>", "<|eot|>"]

SAID = [
    ["Hi", "Hello there."],
    ["What is 1 + 1?", "two", "Sure?", "<think>I am.</think>Quite sure: zwei, \u4e8c, \U0001f600!"],
    ["a", "a", "a", "a"],
    ["  padded  ", "  spaces around \n"],
    ["<|im_end|>", "<|im_end|> is how it ends"],
]


def answer_of(name: str, text: str, *, last: bool = False) -> str:
    """What counts of an answer in the manner of a template."""
    if name == "qwen":
        text = ("<think>\n\n</think>\n\n" if last else "") + text.split("</think>")[-1].lstrip("\n")
    if name in ("llama", "mistral"):
        text = " " * (name == "mistral") + text.strip()
    return text + ENDS[name]


def messages(said: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(said)]


def write_model_folder(folder: Path, template: str | None, *, in_config: bool = False) -> Path:
    """A tokenizer of single bytes and special tokens, with its settings, as `save_pretrained` writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": END}
    if template is not None and in_config:
        settings["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def prepare(folder: Path, records: Sequence[Any], **settings: Any) -> Path:
    """The prepared data set of these records."""
    raw, output = folder / "raw.jsonl", folder / "out"
    folder.mkdir(exist_ok=True)
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_files(raw, output, **settings)
    return output


def prepare_files(raw: Path, output: Path, **settings: Any) -> Manifest:
    manifest = prepare_all(raw, output, records=RecordKind.CHAT, **settings)
    assert manifest is not None
    return manifest


def documents(output: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and loss mask of each document, read the plain way."""
    manifest = read_manifest(output)
    for shard in manifest.splits["train"].shards:
        tokens, ends, mask = (
            np.fromfile(shard_file(output, "train", shard.name, kind), dtype)
            for kind, dtype in (("tokens", manifest.tokenizer.dtype), ("ends", "<u8"), ("loss_mask", "u1"))
        )
        assert len(mask) == len(tokens) == shard.tokens
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            yield tokens[begin:end].tolist(), mask[begin:end].tolist()


def answers(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The stretches that count, as text."""
    found: list[list[int]] = []
    for before, inside, token in zip([0, *mask], mask, ids, strict=False):
        if inside:
            found = found if before else [*found, []]
            found[-1].append(token)
    return [tokenizer.decode(stretch, skip_special_tokens=False) for stretch in found]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_transformers_and_exactly_the_answers_count(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = write_model_folder(tmp_path / "model", TEMPLATES[name], in_config=name == "llama")
    output = prepare(tmp_path, [{"messages": messages(said)} for said in SAID], tokenizer=str(model / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(output)  # what is prepared has all that transformers needs
    mine = Tokenizer.from_file(str(output / "tokenizer.json"))
    for said, (ids, mask) in zip(SAID, documents(output), strict=True):
        # transformers tells a template the date, on which data must not depend.
        assert (
            ids
            == theirs.apply_chat_template(
                messages(said), chat_template=TEMPLATES[name].replace("strftime_now is defined", "false")
            )["input_ids"]
        )
        *earlier, last = said[1::2]
        expected = [*(answer_of(name, text) for text in earlier), answer_of(name, last, last=True)]
        assert answers(mine, ids, mask) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"messages": messages(["Hi", "Hello"])},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Hi", "completion": "Hello", "system": "Be kind"},
        {"prompt": messages(["Hi"]), "completion": [{"role": "assistant", "content": "Hello"}]},
        {"question": "Hi", "answer": "Hello", "messages": None},
        {"instruction": "Hi", "input": "", "output": "Hello"},
    ],
)
def test_the_usual_forms_of_records_are_read(record: dict[str, Any], tmp_path: Path) -> None:
    output = prepare(tmp_path, [record], chat_template="chatml")
    (((ids, mask)),) = documents(output)
    system = f"<|im_start|>system\n{record['system']}<|im_end|>\n" if "system" in record else ""
    assert bytes(ids).decode() == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert bytes(np.array(ids, np.uint8)[np.array(mask) == 1]).decode() == "Hello<|im_end|>"


def test_a_table_gives_no_call_of_a_tool_the_arguments_of_another(tmp_path: Path) -> None:
    (tmp_path / "template").write_text(
        "{% for message in messages %}{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}|{% endfor %}"
    )
    calls = [[{"name": "look", "arguments": {"city": "Oslo"}}], [{"name": "add", "arguments": {"a": 1}}]]
    rows = [{"messages": [*messages(["Hi"]), {"role": "assistant", "tool_calls": call}]} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw.parquet")
    settings: dict[str, Any] = {"chat_template": str(tmp_path / "template"), "loss_on": LossOn.ALL}
    prepare_files(tmp_path / "raw.parquet", tmp_path / "table", **settings)
    assert [bytes(ids).decode() for ids, _ in documents(tmp_path / "table")] == [
        f"Hi|{json.dumps(call)}|" for call in calls
    ]


def test_without_a_template_question_and_answer_are_put_end_to_end_and_the_end_token_counts(tmp_path: Path) -> None:
    output = prepare(tmp_path, [{"prompt": "1 + 1 = ", "completion": "2"}], chat_template="none")
    assert list(documents(output)) == [([*b"1 + 1 = 2", 0], [0] * 7 + [1, 1, 1])]  # with the space before it


def test_loss_on_and_weights_choose_the_answers(tmp_path: Path) -> None:
    said = messages(["a", "b", "c", "d", "e", "f"])
    said[3]["weight"] = 0
    text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in said)
    for loss_on, expected in {
        LossOn.ANSWERS: "b<|im_end|>f<|im_end|>",
        LossOn.LAST_ANSWER: "f<|im_end|>",
        LossOn.ALL: text,
    }.items():
        output = prepare(tmp_path / loss_on, [{"messages": said}], chat_template="chatml", loss_on=loss_on)
        (((ids, mask)),) = documents(output)
        assert bytes(np.array(ids, np.uint8)[np.array(mask) == 1]).decode() == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            QWEN,
            [
                "Hello<|im_end|>",
                "<tool_call>look</tool_call><|im_end|>",
                "<tool_call>ask</tool_call><|im_end|>",
                "It rains.<|im_end|>",
            ],
        ),
        (LLAMA, ["Hello<|eot|>", '{"name": "look"}<|eot|>', '{"name": "ask"}<|eot|>', "It rains.<|eot|>"]),
        (
            MISTRAL,
            [" Hello</s>", '[CALLS] [{"name": "look"}]</s>', '[CALLS] [{"name": "ask"}]</s>', " It rains.</s>"],
        ),
    ],
)
def test_calls_of_tools_beside_or_in_place_of_a_content_count_and_what_others_say_does_not(
    template: str, expected: list[str], tmp_path: Path
) -> None:
    model = write_model_folder(tmp_path / "model", template)
    said = [
        *messages(["Hi", "Hello", "Weather?"]),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "ask"}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        *messages(["Thanks", "Bye", "And now?"]),
    ]
    said[-2]["weight"] = 0
    record = {"messages": said, "tools": [{"name": "look"}]}
    output = prepare(tmp_path, [record], tokenizer=str(model / "tokenizer.json"))
    (((ids, mask)),) = documents(output)
    assert answers(Tokenizer.from_file(str(model / "tokenizer.json")), ids, mask) == expected


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_the_last_call_counts_and_not_one_before_in_the_same_words(template: str, tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
    said = [{"role": "user", "content": "Weather?"}, call, {"role": "tool", "content": "not yet"}, call]
    choice: dict[str, Any] = {"tokenizer": str(model / "tokenizer.json"), "loss_on": LossOn.LAST_ANSWER}
    (((ids, mask)),) = documents(prepare(tmp_path, [{"messages": said}], **choice))
    tokenizer, first = Tokenizer.from_file(str(model / "tokenizer.json")), mask.index(1)
    assert "not yet" in tokenizer.decode(ids[:first]) and "look" in tokenizer.decode(ids[first:])


@pytest.mark.parametrize("end", ["", "<|close|>"])
def test_calls_after_a_content_count_where_the_template_has_no_special_token_at_the_end_of_a_turn(
    end: str, tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls or [] %}<|start|>call " + CALLS + "{% endfor %}" + end + "\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    model = write_model_folder(tmp_path / "model", template)
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "look"}, {"name": "ask"}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Once more.", "tool_calls": [{"name": "look"}]},
    ]
    output = prepare(tmp_path, [{"messages": said}], tokenizer=str(model / "tokenizer.json"))
    (((ids, mask)),) = documents(output)
    last = end.strip()
    assert answers(Tokenizer.from_file(str(model / "tokenizer.json")), ids, mask) == [
        f'I look.<|start|>call {{"name": "look"}}<|start|>call {{"name": "ask"}}{last}',
        f'Once more.<|start|>call {{"name": "look"}}{last}',
    ]


def test_the_first_token_of_an_answer_counts_and_the_end_token_wherever_their_offsets_lie(tmp_path: Path) -> None:
    """A token may begin with the prompt's last blank; special tokens with rstrip, as of Phi 3, reach beyond their text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "\u0120y"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u0120", "y")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True, rstrip=True) for name in ("<|end|>", "<|says|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "template").write_text(
        "{% for message in messages %}{{ message.role }}:<|says|>\n{{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:<|says|>\n{% endif %}"
    )
    settings: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "eos": "none"}
    said = [{"messages": messages(["Hi", "  so", "Hm", "yes"])}]
    ((ids, mask),) = documents(prepare(tmp_path / "phi", said, chat_template=str(tmp_path / "template"), **settings))
    counted = [tokenizer.id_to_token(token) for token, counts in zip(ids, mask, strict=True) if counts]
    assert counted == ["s", "o", "<|end|>", "y", "e", "s", "<|end|>"]

    pair = [{"prompt": "ok? ", "completion": "yes"}]
    ((ids, mask),) = documents(prepare(tmp_path / "pair", pair, chat_template="none", **settings))
    assert [tokenizer.id_to_token(token) for token in ids[3:]] == ["\u0120y", "e", "s"] and mask == [0, 0, 0, 1, 1, 1]


def test_a_token_that_ends_the_whole_conversation_hides_no_end_of_an_earlier_answer() -> None:
    """As Phi-3 writes them."""
    template = ChatTemplate(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
        (("eos_token", "<|endoftext|>"),),
        LossOn.ANSWERS,
    )
    found = template.render(Conversation(tuple(messages(["a?", "b.", "c?", "d."]))))
    assert isinstance(found, RenderedText) and found.spans is not None
    assert [found.text[begin:end] for begin, end in found.spans] == ["b.<|end|>", "d.<|end|>\n<|endoftext|>"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a document"}, "neither 'messages' nor a question and its answer, but 'text'"),
        ({"messages": messages(["only a question"])}, "the assistant says nothing"),
        ({"messages": "Hi"}, "'messages' is no list, but str"),
        ({"conversations": [{"from": ["gpt"], "value": "Hi"}]}, "conversations[0] has no 'role'"),
        ({"messages": messages(["a", "b", "c"])[1:]}, "roles must alternate"),
        ({"prompt": 3, "completion": "three"}, "'prompt' is no string, but int"),
    ],
)
def test_a_record_that_is_no_conversation_is_told_and_left_out(
    record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = write_model_folder(tmp_path / "model", MISTRAL)
    good = {"messages": messages(["Hi", "Hello"])}
    output = prepare(tmp_path, [good, record], tokenizer=str(model / "tokenizer.json"), max_bad_share=0.5)
    (told,) = [json.loads(line) for line in (output / "bad.jsonl").read_text().splitlines()]
    assert told["record"] == 2 and reason in told["reason"]
    assert len(list(documents(output))) == 1


@pytest.mark.parametrize("packing", ["concat", "best_fit", "documents"])
def test_exactly_the_targets_that_count_are_kept_in_every_packing(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Every answer is of capitals, which nothing else is made of.
    records = [{"prompt": "q" * (5 + 3 * n), "completion": chr(65 + n) * (1 + 2 * n)} for n in range(9)]
    output = prepare(tmp_path, records, chat_template="none", unit_mb=0.0002)
    dataset = PreparedText(str(output), seq_len=20, packing=packing).train
    assert len(read_manifest(output).splits["train"].shards) > 1
    expected = sorted((65 + n, 1 + 2 * n) for n in range(9))
    kept: list[int] = []
    for start in range(0, len(dataset), 2):
        batch = dataset.get_batch(np.arange(start, min(start + 2, len(dataset))))
        inputs, targets = batch["inputs"], batch["targets"]
        assert (targets != -100).any() or packing != "best_fit"
        counted = targets != -100
        for given, target in zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True):
            assert (given in (ord("q"), target)) if target else given >= 65  # an answer goes on, or ends
            kept.append(target)
    counts = {token: kept.count(token) for token in set(kept)}
    if packing == "documents":  # what does not fit is cut
        assert all(counts[token] <= count for token, count in expected if token in counts) and counts[65] == 1
    else:
        assert sorted((token, count) for token, count in counts.items() if token) == expected
        assert counts[0] == 9


def test_what_cannot_be_prepared_is_refused_in_a_sentence(tmp_path: Path) -> None:
    record = {"prompt": "a", "completion": "b"}
    with pytest.raises(ConfigError, match="the tokenizer bytes has no chat template"):
        prepare(tmp_path, [record])
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="is not a valid Jinja template"):
        prepare(tmp_path, [record], chat_template=str(tmp_path / "broken.jinja"))
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare(tmp_path, [record], chat_template=str(tmp_path / "none.jinja"))
    (tmp_path / "raw.txt").write_text("Hi")
    with pytest.raises(ConfigError, match=r"is text, which has no fields"):
        prepare_files(tmp_path / "raw.txt", tmp_path / "out", chat_template="chatml")


@pytest.mark.parametrize("template", ["chatml", "none"])
def test_tools_that_a_template_has_no_form_for_are_refused_and_not_left_out(template: str, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    turns = messages(["Hi", "Hello"])
    records = [{"messages": [turns[0], call]}, {"messages": turns, "tools": [{"name": "add"}]}, {"messages": turns}]
    output = prepare(tmp_path, records, chat_template=template, max_bad_share=0.7)
    assert (output / "bad.jsonl").read_text().count("it has tools, calls them") == 2


def test_another_template_makes_another_data_set(tmp_path: Path) -> None:
    record = {"prompt": "a", "completion": "b"}
    output = prepare(tmp_path, [record], chat_template="chatml")
    with pytest.raises(ConfigError, match=r"the sha256 of prepare\.chat_template was \w{64}, now "):
        prepare_files(tmp_path / "raw.jsonl", output, chat_template="none")
    manifest = read_manifest(output)
    assert manifest.chat is not None and manifest.chat.loss_on == "answers"
    assert TokenizerChoice("bytes").name == manifest.tokenizer.kind


def test_jinja_programs_run_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="1 of 1 records are bad"):
        prepare(tmp_path, [{"prompt": "a", "completion": "b"}], chat_template=str(tmp_path / "bad.jinja"))
