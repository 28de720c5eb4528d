"""Signals become a wish to stop, and afterwards act as before."""

import os
import signal

import pytest

from mindspeed_llm.foundation.signals import stop_on_signal


@pytest.fixture(autouse=True)
def _interrupts_as_on_a_terminal():
    """A shell starts its background jobs with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_sets_the_request(number):
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_second_interrupt_acts_at_once():
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_switched_off_nothing_is_caught():
    with pytest.raises(KeyboardInterrupt), stop_on_signal(enabled=False):
        os.kill(os.getpid(), signal.SIGINT)
