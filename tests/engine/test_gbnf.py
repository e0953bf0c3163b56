"""Grammars of llama.cpp take the texts that they take there."""

from __future__ import annotations

import pytest

from edgeh2o.engine.gbnf import lark_of_gbnf
from edgeh2o.engine.grammar import Grammar, GrammarCompiler
from edgeh2o.errors import UsageError
from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.spm_vocabulary import make_spm_metadata

JSON = r"""# as llama.cpp's grammars/json.gbnf has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
# A grammar, texts that have its form, and texts that have not.
CASES = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yesno"]),
    (JSON, ['{"a": [1, -2.5e3, "x\\u00e9", {}], "b": null}', "{}"], ["[]", '{"a"}', '{"a": 01}']),
    # Rules that are regular are no words, which would be as long as they can be.
    ('root ::= name "end"\nname ::= [a-z ]*', ["end", "the end", "endend"], ["the en", ""]),
    ('root ::= b "c"\nb ::= [a-c]+', ["abc", "cc"], ["c", "ab"]),
    ('root ::= [a-z]* "end"', ["enend", "end"], ["en"]),
    ('root ::= "a" "bd" | "ab" "c"', ["abd", "abc"], ["ab"]),
    ('root ::= "a" . "b"', ["a\nb", "a\U0001f600b"], ["ab", "a"]),
    # Repetitions of repetitions, and of whole texts.
    ('root ::= ("a"?)*', ["", "aa"], ["b"]),
    ("root ::= ( [x]* )* ", ["", "xx"], ["y"]),
    ('root ::= "ab"{2} "c"{1,} "d"{0,1}', ["ababc", "ababccd"], ["abc", "ababd", "ababcdd"]),
    # Characters.
    (r'root ::= "\U0001F600" [\u00e9\x41-C]', ["\U0001f600\u00e9", "\U0001f600B"], ["\U0001f600D"]),
    (r'root ::= "\"\\\n\t\r\[\]"', ['"\\\n\t\r[]'], []),
    (r"root ::= [a\]\[/&^-]+", ["a]", "[/&", "^-"], ["b", "\\"]),
    (r"root ::= [^a-c\n]", ["d", "\u0416"], ["b", "\n", ""]),
    ("root ::= [+-]", ["+", "-"], [","]),
    # Names.
    ('Item ::= "x"\nitem ::= "y"\nroot ::= Item item', ["xy"], ["xx", "yx"]),
    ('root ::= start a-b a_b\nstart ::= "s"\na-b ::= "1"\na_b ::= "2"', ["s12"], ["s11"]),
    ('root ::= [a-z] root | ""', ["", "abc"], ["A"]),
    # Lines and notes.
    ('# first\r\nroot ::=\r\n  "a" | # or\r\n  "b" ( # then\r\n "c" )?\r\n', ["a", "bc"], ["c"]),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = build_tokenizer(make_spm_metadata())
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def _takes(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    state = compiler.compile(grammar)
    tokenizer = compiler._tokenizer
    for token_id in tokenizer.encode(text, add_special=False, before=" "):
        if not state.allows(token_id):
            return False
        assert any(state.mask())
        state.accept(token_id)
    return state.is_complete


@pytest.mark.parametrize(("text", "taken", "refused"), CASES)
def test_texts_of_a_grammar(
    compiler: GrammarCompiler, text: str, taken: list[str], refused: list[str]
) -> None:
    grammar = Grammar("gbnf", text)
    for answer in taken:
        assert _takes(compiler, grammar, answer), answer
    for answer in refused:
        assert not _takes(compiler, grammar, answer), answer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no rule 'root'"),
        ('start ::= "a"', "it has no rule 'root'"),
        ('root ::= "a"\nroot = "b"', "line 2: '::=' is missing"),
        ('root ::= "a"\n  "b"', "line 2: a rule must begin with its name"),
        ('root ::= "a" ) "b"', "line 1: a rule must end with its line"),
        ('root ::= ("a"', r"line 1: '\)' is missing"),
        ('root ::= * "a"', "line 1: a rule must end with its line"),
        ('root ::=\n "a" other', "line 2: there is no rule 'other'"),
        ('root ::= "a', "line 1: it ends within a text"),
        ("root ::= [a", "line 1: it ends within a text or a class"),
        (r'root ::= "\d"', r"line 1: '\\\\d' does not begin a character"),
        (r'root ::= "\u00g0"', "does not begin a character"),
        (r'root ::= "\ud83d"', "does not begin a character"),
        (r'root ::= "\U00110000"', "does not begin a character"),
        ('root ::= "a"{2001}', "more than 2000 repetitions"),
        ('root ::= "a"{,3}', "a rule must end with its line"),
        ("root ::= [b-a]", "invalid .* range"),
        ("root ::= []", "cannot be used"),
        ("root ::= <[10]>", "line 1: tokens .* are not supported; write their text"),
        ("root ::= root", "no text that ends has its form"),
        ("root ::= " + "(" * 100_000, "it is nested too deep"),
        ('root ::= "a"' + "*" * 100_000, "8 repetitions of repetitions or more"),
    ],
)
def test_what_is_wrong_is_named(compiler: GrammarCompiler, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compiler.compile(Grammar("gbnf", text)).mask()


def test_rules_have_names_of_their_own() -> None:
    lark = lark_of_gbnf('root ::= A a\nA ::= "1"\na ::= "2"')
    names = [line.partition(":")[0] for line in lark.splitlines()[1:]]
    assert len(names) == len(set(names)) == 4
