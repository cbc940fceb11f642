"""The command `bentoml-compile`: artifacts, keys, graph breaks, traces and a machine's faults, without serving.

A file here holds one command or one group; it imports torch, BentoML and the like inside of its functions.
"""

from __future__ import annotations

import click

from bentoml_compile.cli import artifacts, doctor, explain, keys, pack, trace, warm, why


@click.group()
@click.version_option(package_name="bentoml-compile")
def main() -> None:
    """Compiled PyTorch models in BentoML: artifacts, keys, graph breaks, traces, and what is wrong with a machine."""


artifacts.artifacts.add_command(why.why)
main.add_command(artifacts.artifacts)
main.add_command(doctor.doctor)
main.add_command(explain.explain)
main.add_command(keys.keys)
main.add_command(pack.pack)
main.add_command(trace.trace)
main.add_command(warm.warm)
