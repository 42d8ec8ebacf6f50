"""`meshwright completion`: the completion script of a shell."""

from typing import Annotated

import typer
from typer.completion import get_completion_script

from meshwright.cli.main import COMPLETE_VARIABLE

SHELLS = ("bash", "zsh", "fish")
# After `parallel.tp=`, `h100:` and `recipes/` the word goes on.
_NO_SPACE = "    [[ ${COMPREPLY[0]} == *[=:/] ]] && compopt -o nospace 2>/dev/null\n"


def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell: verbs, options, recipes, families, clusters and settings.

    bash: meshwright completion bash > ~/.local/share/bash-completion/completions/meshwright

    zsh: meshwright completion zsh > a file _meshwright in a folder of $fpath

    fish: meshwright completion fish > ~/.config/fish/completions/meshwright.fish
    """
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SHELLS)}", param_hint="SHELL")
    script = get_completion_script(prog_name="meshwright", complete_var=COMPLETE_VARIABLE, shell=shell)
    typer.echo(script.replace("    return 0\n", f"{_NO_SPACE}    return 0\n") if shell == "bash" else script)
