"""What happens as soon as another library is imported, before or after flashgen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def after_import(library: str, act: Callable[[], None]) -> None:
    """Call ``act`` now, if the library is imported already, or once it is."""
    if sys.modules.get(library) is None:
        sys.meta_path.insert(0, _Finder(library, act))
    else:
        act()


class _Finder:
    """Finds the library as the other finders do, and adds ``act`` to the end of its import."""

    def __init__(self, library: str, act: Callable[[], None]) -> None:
        self.library, self._act = library, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.library:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._act()

            spec.loader.exec_module = exec_module
        return spec
