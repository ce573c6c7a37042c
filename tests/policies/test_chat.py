"""bupo.policies.chat: growing ids equal the template's own rendering, and players cannot forge control tokens."""

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from bupo.policies.chat import ChatFormat, ChatTemplateError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = CHATML.replace(
    "{% for message in messages %}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}",
)
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTING = CHATML.replace("'<|im_start|>' + message['role']", "'<|im_start|>' + (messages | length | string)")
LENGTHY = CHATML.replace(
    "message['content'] +",
    "message['content'] + ('' if message['role'] == 'assistant' else (message['content'] | length | string)) +",
)


def words(template=None):
    made = tiny.tokenizer()
    if template is not None:
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        made.chat_template = template
    return made


def play(chat, system, prompts, replies):
    """A dialogue as the rollout grows it: ids only, each reply ended by the stop token."""
    ids = chat.open(system, prompts[0])
    for reply, prompt in zip(replies, prompts[1:], strict=True):
        ids += chat.reply(reply)
        ids += chat.extend(prompt, ids[-1])
    return ids


TEMPLATES = pytest.mark.parametrize("template", [None, CHATML], ids=["nano", "chatml"])
text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30)
harmless = text.filter(lambda words: "<|" not in words)


@TEMPLATES
def test_grown_ids_decode_to_the_template_rendering_of_the_whole_conversation(template):
    tokenizer = words(template)
    prompts = ["You open.\n(Round 1 of 6.)", "We ask 900.\n(Round 2 of 6.)", "Too much: 45 days?\n(Round 3 of 6.)"]
    replies = ["I offer 880 with payment in 30 days.", "That is fair. [Accept]"]
    ids = play(ChatFormat(tokenizer), "You buy for Hartwell Tools.", prompts, replies)
    messages = [{"role": "system", "content": "You buy for Hartwell Tools."}]
    for index, prompt in enumerate(prompts):
        messages.append({"role": "user", "content": prompt})
        if index < len(replies):
            messages.append({"role": "assistant", "content": replies[index]})
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == expected


@TEMPLATES
@given(prompts=st.lists(harmless, min_size=3, max_size=3), replies=st.lists(harmless, min_size=2, max_size=2))
def test_grown_ids_decode_to_the_template_rendering_for_any_words(template, prompts, replies):
    tokenizer = words(template)
    ids = play(ChatFormat(tokenizer), "system", prompts, replies)
    messages = [{"role": "system", "content": "system"}, {"role": "user", "content": prompts[0]}]
    for prompt, reply in zip(prompts[1:], replies, strict=True):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": prompt}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@TEMPLATES
def test_reply_cut_before_its_stop_token_gets_the_end_of_turn_from_the_next_extension(template):
    tokenizer = words(template)
    chat = ChatFormat(tokenizer)
    whole = chat.open("s", "one") + chat.reply("fine")
    cut = whole[:-1]
    grown, grown_cut = whole + chat.extend("two", whole[-1]), cut + chat.extend("two", cut[-1])
    assert grown_cut == grown


@TEMPLATES
def test_stop_ids_are_the_end_of_turn_and_the_eos_token(template):
    tokenizer = words(template)
    stop = tokenizer.convert_tokens_to_ids("<|end|>" if template is None else "<|im_end|>")
    assert ChatFormat(tokenizer).stop_id == stop
    assert set(ChatFormat(tokenizer).stop_ids) == {stop, tokenizer.eos_token_id}


@TEMPLATES
def test_control_tokens_in_a_players_text_are_removed(template):
    tokenizer = words(template)
    chat = ChatFormat(tokenizer)
    specials = set(tokenizer.all_special_ids)
    honest, plain = chat.open("s", "a b"), chat.extend("a b", chat.stop_id)
    for forged in tokenizer.all_special_tokens:
        attack = f"a{forged}b"
        assert chat.open("s", attack) == honest
        assert chat.extend(attack, chat.stop_id) == plain
        assert not specials & set(tokenizer.encode(chat.clean(attack), add_special_tokens=False))


@TEMPLATES
@given(
    parts=st.lists(st.sampled_from(["<|", "|>", "end", "user", "im_end", "<|end|>", "<|im_end|>", " "]), max_size=12)
)
def test_no_nesting_of_control_tokens_survives_cleaning(template, parts):
    tokenizer = words(template)
    ids = tokenizer.encode(ChatFormat(tokenizer).clean("".join(parts)), add_special_tokens=False)
    assert not set(tokenizer.all_special_ids) & set(ids)


def test_sampled_control_tokens_do_not_reach_the_other_side():
    tokenizer = words()
    chat = ChatFormat(tokenizer)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    ids = [*tokenizer.encode("  I accept"), user, chat.stop_id]
    assert chat.text(ids) == "I accept"


def test_text_of_a_reply_is_the_reply():
    chat = ChatFormat(words())
    assert chat.text(chat.reply("I offer 880 with payment in 30 days.")) == "I offer 880 with payment in 30 days."


def test_template_without_a_system_role_carries_it_in_the_first_message():
    tokenizer = words(NO_SYSTEM)
    chat = ChatFormat(tokenizer)
    assert not chat.has_system
    expected = "<|im_start|>user\nrules\n\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat.open("rules", "hello")) == expected


@pytest.mark.parametrize("template", [FORGETFUL, COUNTING], ids=["drops replies", "counts messages"])
def test_template_that_rewrites_earlier_turns_is_refused(template):
    with pytest.raises(ChatTemplateError, match="not prefix-stable"):
        ChatFormat(words(template))


def test_template_whose_control_text_depends_on_the_message_is_refused():
    with pytest.raises(ChatTemplateError, match="depends on the message"):
        ChatFormat(words(LENGTHY))


def test_missing_template_is_refused_with_a_way_out():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match=r"no chat template; take an instruction-tuned base"):
        ChatFormat(tokenizer)
