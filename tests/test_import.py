"""How the public names of the package are imported."""

from __future__ import annotations

from tests.support.interpreter import run_python


def test_nothing_is_collected_while_a_public_name_is_imported() -> None:
    """Every collection would traverse PyTorch's 300,000 objects."""
    code = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch" in sys.modules))
import fedbilevel as fb
fb.solve
print(sum(collections) <= 2, gc.isenabled())  # start and stop of one, at the end
gc.disable()
fb.check
print(gc.isenabled())
"""
    assert run_python(code).split() == ["True", "True", "False"]


def test_the_collector_is_on_again_after_an_import_that_failed() -> None:
    code = """
import gc, sys
import fedbilevel as fb
sys.modules["torch"] = None
try:
    fb.solve
except ImportError:
    print(gc.isenabled())
"""
    assert run_python(code).split() == ["True"]
