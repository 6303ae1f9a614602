"""Programs of other people, run as they are run from a shell."""

import asyncio
from collections.abc import Mapping

from tests.support.environments import environment

Options = Mapping[str, object]


async def run(
    client: tuple[str, ...], program: str, *arguments: object, options: Options | None = None
) -> str:
    """What a program prints, once it has ended well.

    client: its name, and what is installed for it.
    options: by the names that they have on its command line.
    """
    programs = await asyncio.to_thread(environment, *client)
    flags = [part for option in (options or {}).items() for part in option]
    process = await asyncio.create_subprocess_exec(
        programs / program,
        *map(str, (*arguments, *flags)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed[-4000:]
    return printed
