"""Templates of graders: what they may name, and hostile ones, which take no more time than their
length says.
"""

from __future__ import annotations

import pytest

from ft_service.graders.grades import Case, GradingError, Sample
from ft_service.graders.templates import MOST_FILLED, TemplateError, check_template, filled

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CASE = Case(Sample('{"a": [1, {"b": "é"}]}', (CALL,)), {"x": {"y": [None, 2.5]}, "name": "Ann"})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{item.name}} and {{ item.name }}", "Ann and Ann"),
        ("{{item.x.y[1]}}", "2.5"),
        ("{{item.x}}", '{"y": [null, 2.5]}'),
        ("{{sample.output_text}}", '{"a": [1, {"b": "é"}]}'),
        ("{{sample.output_json.a[1].b}}", "é"),
        ("{{sample.output_json}}", '{"a": [1, {"b": "é"}]}'),
        ("{{sample.output_tools[0].function.name}}", "add"),
        (
            "{{sample.choices[0].message.tool_calls[0].id}} {{sample.choices[0].finish_reason}}",
            "c1 stop",
        ),
        ("{ {item.name} } {{", "{ {item.name} } {{"),
        ("}} {{item.name}}", "}} Ann"),
        ("", ""),
    ],
)
def test_values_are_filled_in(template: str, text: str) -> None:
    assert filled(template, CASE) == text


@pytest.mark.parametrize(
    "template",
    [
        *(
            "{{}}",
            "{{item}}",
            "{{sample}}",
            "{{sample.tokens}}",
            "{{sample.output_text.x}}",
            "{{item.__class__()}}",
        ),
        *(
            "{{item.x | upper}}",
            "{{ item['x'] }}",
            "{{item[" + "9" * 5000 + "]}}",
            "{{{item.x}}}",
            "{{item.x\0}}",
        ),
    ],
)
def test_what_names_nothing_is_refused(template: str) -> None:
    with pytest.raises(TemplateError, match="names nothing"):
        check_template(template)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{item.none}}", "invalid_variable_error"),
        ("{{item.name.y}}", "invalid_variable_error"),
        ("{{item.__class__}}", "invalid_variable_error"),
        ("{{sample.output_json.b}}", "sample_parse_error"),
        ("{{sample.output_tools[1]}}", "sample_parse_error"),
    ],
)
def test_what_is_not_there_is_an_error_of_its_kind(template: str, kind: str) -> None:
    with pytest.raises(GradingError) as error:
        filled(template, CASE)
    assert error.value.kind == kind


@pytest.mark.timeout(20)
def test_hostile_templates_take_no_more_time_than_their_length() -> None:
    """A pattern that tries every pair of braces, or every split of white space, would take
    hours.
    """
    for template in (
        "{{" * 8192,
        "{{" + " " * 16_000,
        "{{" + " " * 16_000 + "x",
        "{{ item.a" + ".a" * 8000,
        "}}" * 8192,
    ):
        assert filled(template, CASE) == template
    for template in ("{{" + " " * 8000 + "item.name" + " " * 8000 + "}}", "{{item.name}}" * 1200):
        assert "Ann" in filled(template, CASE)
    with pytest.raises(TemplateError):
        check_template("{{item" + ".a" * 8000 + "!}}")


def test_what_is_filled_in_is_limited() -> None:
    long = Case(Sample("a" * 2**18), {})
    assert len(filled("{{sample.output_text}}" * 4, long)) == MOST_FILLED
    with pytest.raises(GradingError, match="more than"):
        filled("{{sample.output_text}}" * 4 + "!", long)
