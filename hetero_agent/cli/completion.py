"""Bash completion of heteroctl, made from its parser: ``python3 -m hetero_agent.cli.completion``.

What the parser does not have (devices, leases, resources of the moment) the script asks heteroctl
for when a word is completed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Final

from hetero_agent.cli.main import build_parser

#: Placeholder of a value, as the help shows it, or the option's own name -> what completes it.
_KINDS: Final = {
    "DEVICE": "device",
    "LEASE": "lease",
    "RESOURCE": "resource",
    "PARENT": "virtual",
    "PID": "process",
    "PIDS": "process",
    "UNIT": "unit",
    "PATH": "file",
}

#: The same for arguments without an option before them, where it differs.
_ARGUMENT_KINDS: Final = {"NAME": "device lease", "ID": "virtual"}

_HEAD: Final = """\
# bash completion of heteroctl -*- shell-script -*-
# Made from heteroctl's own command line; changes belong into hetero_agent/cli/completion.py.

"""

_TAIL: Final = r"""
# What there is of a kind now, one a line.
_heteroctl_existing() {
    case $1 in
        device) heteroctl list 2>/dev/null | awk 'NR > 1 { print $1 }' ;;
        resource) heteroctl list 2>/dev/null | awk 'NR > 1 && !seen[$2]++ { print $2 }' ;;
        lease) heteroctl leases 2>/dev/null | awk 'NR > 1 { print $1 }' ;;
        virtual) heteroctl sim list 2>/dev/null | awk 'NR > 1 { print $1 }' ;;
        unit) systemctl list-units --all --plain --no-legend --no-pager 2>/dev/null | awk '{ print $1 }' ;;
        process) (cd /proc && printf '%s\n' [0-9]*) ;;
        =*) printf '%s\n' "${1#=}" ;;
    esac
}

# The rest of the line is a command of its own; the number of its words before the current one is given.
_heteroctl_command() {
    local at
    for ((at = 1; at < COMP_CWORD; at++)); do
        if [[ ${COMP_WORDS[at]} == -- ]] && declare -F _command_offset >/dev/null; then
            _command_offset $((at + 1))
            return
        fi
    done
    if (($1)); then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -c -- "$cur")
    fi
}

_heteroctl() {
    # bash's own words are broken at the colons of device ids
    local line=${COMP_LINE:0:COMP_POINT} cur verb='' kinds='' word kind start=''
    local -a words found
    local -i command=-1
    COMPREPLY=()
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=('')
    cur=${words[-1]}
    unset 'words[-1]'
    for word in "${words[@]:1}"; do
        if ((command >= 0)); then
            command+=1
        elif [[ $kinds && $word != -* ]]; then  # a value that may be left out is not an option
            kinds=''
        elif [[ $word == -- ]]; then
            [[ $(_heteroctl_arguments "$verb") == command ]] && command=0
        elif [[ $word == -* ]]; then
            kinds=$(_heteroctl_value "$verb" "$word")
        elif [[ " $(_heteroctl_verbs "$verb") " == *" $word "* ]]; then
            verb=${verb:+$verb }$word
        elif [[ $(_heteroctl_arguments "$verb") == command ]]; then
            command=1
        fi
    done

    if ((command >= 0)); then
        _heteroctl_command $command
        return
    elif [[ $kinds && $cur != -* ]]; then
        :
    elif [[ $cur == --*=* ]]; then
        kinds=$(_heteroctl_value "$verb" "${cur%%=*}")
        [[ $COMP_WORDBREAKS == *=* ]] || start=${cur%%=*}=
        cur=${cur#*=}
    elif [[ $cur == -* ]]; then
        kinds="$(_heteroctl_options "$verb")"
    else
        kinds="$(_heteroctl_verbs "$verb" | sed 's/[^ ]*/=&/g') $(_heteroctl_arguments "$verb")"
    fi

    for kind in $kinds; do
        if [[ $kind == file ]]; then
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$cur")
            return
        fi
        mapfile -t -O ${#found[@]} found < <(_heteroctl_existing "$kind")
    done
    # what bash puts in stands for the part after the last colon only
    local before=''
    [[ $COMP_WORDBREAKS == *:* && $cur == *:* ]] && before=${cur%"${cur##*:}"}
    for word in "${found[@]}"; do
        [[ $word == "$cur"* ]] && COMPREPLY+=("$start${word#"$before"}")
    done
}

complete -F _heteroctl heteroctl
"""


def script() -> str:
    """Return the completion script."""
    parsers = dict(walk(build_parser(), ""))
    return (
        _HEAD
        + _function("options", "The options of a verb.", parsers, _options)
        + _function("verbs", "The verbs after a verb.", parsers, _verbs)
        + _function("arguments", "The kinds of a verb's other arguments.", parsers, _arguments)
        + _values(parsers)
        + _TAIL
    )


def walk(parser: argparse.ArgumentParser, verb: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every verb with its parser: "" for heteroctl itself, "sim add" for a verb of a verb."""
    yield verb, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from walk(child, f"{verb} {name}".strip())


def _function(
    name: str,
    text: str,
    parsers: dict[str, argparse.ArgumentParser],
    of: Callable[[argparse.ArgumentParser], list[str]],
) -> str:
    lines = [f"# {text}", f"_heteroctl_{name}() {{", "    case $1 in"]
    for verb, parser in parsers.items():
        words = of(parser)
        if words:
            lines.append(f"        {shlex.quote(verb)}) echo {shlex.quote(' '.join(words))} ;;")
    return "\n".join([*lines, "    esac", "}", "", ""])


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [f"={option}" for action in parser._actions for option in action.option_strings]


def _verbs(parser: argparse.ArgumentParser) -> list[str]:
    return [
        name
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name in action.choices
    ]


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        if action.option_strings or isinstance(action, argparse._SubParsersAction):
            continue
        if action.nargs == argparse.REMAINDER:
            return ["command"]
        placeholder = _placeholder(action)
        found += (_ARGUMENT_KINDS.get(placeholder) or _KINDS.get(placeholder, "")).split()
    return found


def _values(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = [
        '# The kind of value that an option of a verb takes; nothing if it takes none, "text" for any.',
        "_heteroctl_value() {",
        '    case "$1 $2" in',
    ]
    for verb, parser in parsers.items():
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                pattern = "|".join(shlex.quote(f"{verb} {option}") for option in action.option_strings)
                lines.append(f"        {pattern}) echo {shlex.quote(_kind(action))} ;;")
    return "\n".join([*lines, "    esac", "}", ""])


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(f"={choice}" for choice in action.choices)
    return _KINDS.get(_placeholder(action)) or _KINDS.get(action.dest.upper(), "text")


def _placeholder(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


if __name__ == "__main__":
    sys.stdout.write(script())
