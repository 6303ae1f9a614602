"""Graceful shutdown of ``serve run`` on Ctrl-C and SIGTERM: running answers finish, then Serve stops."""

import logging
import signal
import threading
import time
from types import FrameType

from ray import serve

logger = logging.getLogger(f"ray.serve.{__name__}")

GATEWAY = "gateway"  # name of the deployment
MARGIN_S = 5.0  # seconds that gateways may take to reply, beyond the time of their requests
LAST_BYTES_S = 1.0  # seconds for Serve's proxies to pass on the last bytes of gateways


def stop_in_order(within_s: float) -> None:
    """Installs signal handlers for a graceful shutdown; called in the main thread.

    Ray's own handlers end the cluster at once, and print a native stack trace. A script's background
    processes ignore Ctrl-C by default, but a service should handle it.

    Args:
        within_s: seconds that running requests have to finish.
    """
    stop = _Stop(within_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


class _Stop:
    """Signal handler: the first signal lets requests finish, the second signal ends at once."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._is_asked = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt at the second signal: ``serve run`` then ends Serve and exits with 0."""
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        # The main thread may be inside a call of Ray, and a second call could block.
        threading.Thread(target=self._end, name="stop", daemon=True).start()

    def _end(self) -> None:
        try:
            if let_requests_end(self._within_s):
                time.sleep(LAST_BYTES_S)
        except Exception as error:
            logger.warning("requests under way could not be waited for: %s", error)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def let_requests_end(within_s: float) -> int:
    """Makes all gateways refuse new requests, waits for running requests, and returns their number."""
    applications = serve.status().applications
    handles = [
        serve.get_deployment_handle(GATEWAY, name)
        for name, application in applications.items()
        if GATEWAY in application.deployments
    ]
    logger.info("the service is being stopped: requests under way have %g s to end", within_s)
    leaving = [handle.broadcast("leave", within_s) for handle in handles]
    return sum(sum(each.results(timeout_s=within_s + MARGIN_S)) for each in leaving)
