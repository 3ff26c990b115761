from __future__ import annotations

from random import Random

import pytest

from ft_service.convert.shell_script import Command, read_script
from ft_service.convert.verdicts import Unread
from ft_service.errors import SpecError


def last(text: str) -> Command:
    return read_script(text, "train.sh").commands[-1]


def words(text: str) -> list[str]:
    """The words of the last command; those that are known only when it runs begin with `?`."""
    return [f"?{word}" if isinstance(word, Unread) else str(word) for word in last(text).words]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run a \\\n  --b=c   \\\r\n d # e", ["run", "a", "--b=c", "d"]),
        ("run 'a $b' \"c d\" e\\ f '' \"\"", ["run", "a $b", "c d", "e f", "", ""]),
        ("A=1\nB=$A$A\nrun $B ${A}2 '$A' \"$A\" \\$A", ["run", "11", "12", "$A", "1", "$A"]),
        ("A='x  y'\nrun $A \"$A\"", ["run", "x", "y", "x  y"]),
        ("A=1; A=2 && run $A", ["run", "2"]),
        ("export A=1 B=2\nlocal C=3\nrun $A$B$C", ["run", "123"]),
        ("N=$((1024 * 2))\nrun $((N + 1)) $(( (N+N)/3 )) $((${N} % 7))", ["run", "2049", "1365", "4"]),
        ("N=2\nrun $(expr 32 / $N / 2) $(expr $M / 2)", ["run", "8", "?$(expr $M / 2)"]),
        ("A=(x 'y z'  # no\n w)\nrun \"${A[@]}\" ${A[*]} $A", ["run", "x", "y z", "w", "x", "y", "z", "w", "x"]),
        ("A=(x)\nA+=(y)\nA+=(z)\nrun \"${A[@]}\"", ["run", "x", "y", "z"]),
        ("ARGS=\"--a 1 \\\n  --b $HOME/x\"\nrun $ARGS", ["run", "--a", "1", "--b", "?$HOME/x"]),
        ("run $A ${A} $1 $(date) `date`", ["run", "?$A", "?${A}", "?$1", "?$(date)", "?`date`"]),
        ("run \"$(cat \"x y\")\" b", ["run", '?$(cat "x y")', "b"]),
        ("run ${A%.*} ${#A[@]} ${!A}", ["run", "?${A%.*}", "?${#A[@]}", "?${!A}"]),
        ("run $((A + 1)) $((2 ** 99)) $((1 / 0))", ["run", "?$((A + 1))", "?$((2 ** 99))", "?$((1 / 0))"]),
        ("HERE=$(pwd)\nA=$HERE/x\nrun $A $HERE", ["run", "?$HERE/x", "?$HERE"]),
        ('run "$@" $@ ${@:2} a', ["run", "a"]),
        ("run a=['x','y'] 'b=[\"z\"]' #c\n", ["run", "a=[x,y]", 'b=["z"]']),
        ("run a > log 2>&1", ["run", "a"]),
        ("run a &>> log", ["run", "a"]),
        ("cat <<E > x\nrun 'b\nE\nrun c", ["run", "c"]),
        ("A=1\nif [ $X ]; then A=2; fi\nrun $A", ["run", "?$A"]),
        ("A=1\nif [ $X ]; then A=1; fi\nrun $A", ["run", "1"]),
        ("A=(x)\nif [[ -n $X ]]; then A+=(y); fi\nrun ${A[@]}", ["run", "x", "?y"]),
        ("for i in 1 2; do run $i; done", ["run", "?$i"]),
        ("f() {\n A=1\n}\nrun $A", ["run", "?$A"]),
    ],
)  # fmt: skip
def test_words_are_those_of_the_shell(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_a_pipe_ends_a_command() -> None:
    commands = read_script("run a |& tee <(cat) log\n", "train.sh").commands
    assert [command.words for command in commands] == [["run", "a"], ["tee"], ["cat"], ["log"]]


def test_defaults_count_and_are_told() -> None:
    script = read_script(': "${A:=x}"\nB=${B:-y/$A}\nC=\nrun $A $B ${C:-z} ${C-w}', "train.sh")
    assert script.commands[-1].words == ["run", "x", "y/x", "z"]
    assert script.defaults == {"A": "x", "B": "y/x", "C": "z"}


def test_variables_before_a_command_are_its_environment() -> None:
    command = last("export A=1\nB=2 C=$1 \\\nrun")
    assert (command.line, command.words) == (2, ["run"])
    assert command.environment == {"A": "1", "B": "2", "C": "$1"}


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxx\n" + "A=$A$A\n" * 40,
        "A=(x y)\n" + 'A+=("${A[@]}")\n' * 40,
        "run " + "${A:-" * 1500 + "}" * 1500,
    ],
)
def test_values_have_an_end(text: str) -> None:
    with pytest.raises(
        SpecError, match=r"train\.sh has variables that hold more than 262,144 letters, or too deep"
    ):
        read_script(text, "train.sh")


def test_any_text_is_a_script_or_refused() -> None:
    random = Random(7)
    parts = [
        "$",
        "{",
        "}",
        "(",
        ")",
        "'",
        '"',
        "`",
        "\\",
        "\n",
        " ",
        "a",
        "=",
        "+",
        "<",
        ">",
        "&",
        "|",
        ";",
        "#",
        "if ",
        "fi ",
        "$((",
        "${a:-",
    ]
    ends = {"read": 0, "refused": 0}
    for _ in range(2000):
        try:
            read_script("".join(random.choices(parts, k=30)), "train.sh")
            ends["read"] += 1
        except SpecError:
            ends["refused"] += 1
    assert min(ends.values()) > 100


@pytest.mark.parametrize("text", ["run 'a\n", 'run "a\n', "A=(b\n"])
def test_what_is_not_closed_is_no_script(text: str) -> None:
    with pytest.raises(SpecError, match=r"train\.sh, line [12]: .* is not closed"):
        read_script("# x\n" + text, "train.sh")
