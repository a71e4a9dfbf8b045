"""Acting as another user of the machine, which only root can."""

import json
import os
import traceback

import pytest

OTHER, ANOTHER = 65534, 65533  # no files of a machine belong to them

needs_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can act as another user"
)


def as_user(user, act):
    """What ``act()`` returns, as JSON has it, in a process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            said = {"result": act()}
        except BaseException:  # noqa: BLE001 - it is said in the other process
            said = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as file:
            json.dump(said, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    said = json.loads(text)
    assert "error" not in said, said["error"]
    return said["result"]
