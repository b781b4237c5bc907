import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import Encoder
from tandem.data.examples import ConversationForm, PairForm, PreferenceForm
from tandem.data.forms import PromptForm
from tandem.data.tokens import begin, encoded, tokenize
from tandem.data.truncation import Limit
from tests.data.cases import talk
from tests.support.tokenizers import KINDS, byte_level, metaspace

MARKERS = ["<|user|>", "<|assistant|>"]
PLAIN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
FORMS = (PairForm("prompt", "response"), PreferenceForm(("response", "b"), "prompt", None, side="response"))


def made(form, row, tokenizer, **options):
    """Return the ids of a row, and the mask of the ids that the model learns."""
    encoder = Encoder(form, tokenizer, ChatTemplate(tokenizer, None), Limit(999, ""), learnt=True, **options)
    part = encoder.part([row], [0])
    assert not part.problems and part.error is None
    return part.ids.tolist(), part.masks


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversations_ids_are_those_of_its_template(kind):
    tokenizer = KINDS[kind](MARKERS, PLAIN)
    messages = talk("The sum?", "The answer", "x:", " a  é")
    ids, mask = made(ConversationForm("messages"), {"messages": messages}, tokenizer)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    for asked in (messages[:1], messages[:3]):
        met = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert ids[: len(met)] == met and not mask[len(met) - 1] and mask[len(met)]
    learnt = tokenizer.decode(np.array(ids)[mask])
    assert learnt == "The answer<|end|> a  é<|end|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "response"),
    [("Q: ", "The sum"), ("Q:", " The"), ("Q:\n", "\nThe"), ("a", "nswer"), ("The", ""), ("1+1=", "é")],
)
def test_a_response_follows_its_prompt_as_the_model_meets_it(kind, prompt, response):
    tokenizer = KINDS[kind]()
    before, after = encoded(tokenizer, [[(prompt, False), (response, True)]])[0]
    (met,) = tokenize(tokenizer, [prompt])
    assert before.tolist() == met.tolist() and tokenizer.decode([*before, *after]) == prompt + response
    (whole,) = tokenize(tokenizer, [prompt + response])
    if whole[: len(met)].tolist() == met.tolist():
        assert [*before, *after] == whole.tolist()


def test_several_pieces_where_tokens_would_lie_on_both_sides():
    tokenizer = metaspace()
    pieces = [("Q: ", False), ("The ", True), (" Q: ", False), ("The", True), ("", False)]
    parts = encoded(tokenizer, [[([7], False), *pieces], pieces[:1]])
    assert parts[0][0].tolist() == [7] and parts[1][0].tolist() == parts[0][1].tolist()
    found = [tokenizer.convert_ids_to_tokens(part) for part in parts[0][1:]]
    assert found == [["▁", "<0x51>", ":▁"], ["The", "▁"], ["▁", "<0x51>", ":▁"], ["The"], []]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_preferences_read_alike(kind):
    tokenizer = KINDS[kind](MARKERS, PLAIN)
    row = {"prompt": talk("The sum?"), "response": "The answer"}
    ids, mask = made(PairForm("prompt", "response"), row, tokenizer, ended=True)
    whole = tokenizer.apply_chat_template([*talk("The sum?", "The answer")], return_dict=False)
    assert ids == whole[: len(ids)] and tokenizer.decode(np.array(ids)[mask]) == "The answer<|end|>"
    form = PreferenceForm(("chosen", "rejected"), None, None, texts=False, side="chosen")
    pair = {"chosen": talk("The sum?", "The answer"), "rejected": talk("The sum?", "a")}
    assert made(form, pair, tokenizer)[0] == ids


def test_a_text_prompt_gets_the_tokenizers_begin_token():
    tokenizer = metaspace(MARKERS, PLAIN)
    first = tokenizer.bos_token_id
    for form in FORMS:
        for prompt in ("The sum", "<s>The sum"):
            ids, mask = made(form, {"prompt": prompt, "response": "a", "b": "x"}, tokenizer, ended=True)
            assert ids.count(first) == 1 and ids[0] == first and not mask[0]
            assert ids[:-2] == tokenizer(prompt, add_special_tokens="<s>" not in prompt)["input_ids"]
    for prompt in ("The sum", "<s>The sum", talk("The sum")):
        ids = encoder_ids(PromptForm(needs=None), {"prompt": prompt}, tokenizer)
        assert ids.count(first) == (0 if isinstance(prompt, list) else 1)
    text = PromptForm(needs=None, apply_chat_template=True)
    assert first not in encoder_ids(text, {"prompt": "The sum"}, tokenizer)
    assert encoder_ids(PromptForm(needs=None, as_ids=True), {"prompt": [5, 6]}, tokenizer) == [5, 6]
    assert first not in encoder_ids(PromptForm(needs=None), {"prompt": "The sum"}, byte_level())


def encoder_ids(form, row, tokenizer):
    encoder = Encoder(form, tokenizer, ChatTemplate(tokenizer, None), Limit(999, ""))
    return encoder.part([row], [0]).ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_has_its_end_token_gets_no_other(kind):
    tokenizer = KINDS[kind]()
    for response in ("a", "a<|end|>", "<|end|>", ""):
        for prompt in ("Q:", "Q:<|end|>"):
            row = {"prompt": prompt, "response": response, "b": "x"}
            for form in FORMS:
                ids, mask = made(form, row, tokenizer, ended=True)
                learnt = tokenizer.decode(np.array(ids)[mask])
                assert learnt == ("a<|end|>" if "a" in response else "<|end|>")


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A <|end|>", "<s>:0 <|user|>:0 $A:0", "$A <|end|>", "$A"])
def test_the_begin_token_is_what_stands_before_a_text_and_no_end(single):
    core = Tokenizer(models.WordLevel({"1": 0}))
    core.add_special_tokens(["<s>", "<|end|>", "<|user|>"])
    known = [(token, core.token_to_id(token)) for token in ("<s>", "<|end|>", "<|user|>")]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=known)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    ids = tokenizer("1")["input_ids"]
    assert begin(tokenizer) == ids[: ids.index(0)]
