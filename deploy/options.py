"""The words of the command line: an error that names a field is told to the user with the option that was typed."""

import re
from collections.abc import Mapping

import typer

# Fields under which the parts of a deployment know what the options of `moeray serve` say.
PART_FIELDS = {
    "num_workers": "workers",
    "num_spares": "spares",
    "num_threads": "threads",
    "served_name": "served_model_name",
    "max_inflight_per_worker": "max_num_seqs",
}
# A name of one word may be a word of the sentence as well: it is a field where its value or a verb follows.
FIELD = re.compile(r"(?<![\w./'\"-])(?<!\d )(?:[a-z]+(?:_[a-z0-9]+)+|[a-z]+(?= (?:is|has|names) | \())(?![\w-])")


def typed_names(context: typer.Context) -> Mapping[str, str]:
    """What the user types for each parameter of the command that runs: `--max-queue`, `MODEL`."""
    names: dict[str, str] = {}
    for parameter in context.command.params:
        if parameter.name is not None:
            is_option = parameter.opts[0].startswith("-")
            argument = (parameter.metavar or parameter.name.upper()).strip("[]")
            names[parameter.name] = parameter.opts[0] if is_option else argument
    return names


def in_typed_names(message: str, names: Mapping[str, str]) -> str:
    """The message with options in the place of fields; what is no parameter of this command stays."""
    return FIELD.sub(lambda found: names.get(PART_FIELDS.get(found[0], found[0]), found[0]), message)
