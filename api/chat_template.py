"""Chat messages to prompt text: the checkpoint's Jinja template, rendered as transformers renders it.

transformers itself is not used: importing it costs seconds and loads torch. The environment below follows its
`chat_template_utils`: immutable sandbox, trimmed blocks, loop controls, `{% generation %}`,
`raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template with the special tokens that it may name. `variables` are all that it reads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ValueError` if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template does not compile: {error}") from error
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """The prompt, up to where the assistant's answer begins. `extra` are further variables
        (`enable_thinking`, ...).

        Raises `ValueError` if the template does not read a field of the messages, and with the template's own words if
        it refuses them.
        """
        self._check_is_read(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **(extra or {}),
            )
        except Exception as error:  # a template is foreign code: it can raise anything that Python can
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _check_is_read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What the template would silently ignore is refused."""
        fields = {field for message in messages for field in message} - {"role", "content"}
        if unread := sorted(field for field in fields if field not in self._source):
            raise ValueError(f"the chat template does not read {', '.join(unread)} of a message")
