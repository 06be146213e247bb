"""Write the files by which a system starts the daemon: a systemd unit, a launchd property list.

Both belong to the user, so nothing runs as root.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence

LABEL = "personalpeft"

_SYSTEMD = """\
# Save this as ~/.config/systemd/user/{label}.service, then:
#   systemctl --user daemon-reload && systemctl --user enable --now {label}
# To have it run while you are logged out: loginctl enable-linger
# What it does: journalctl --user -u {label}, or personalpeft daemon status

[Unit]
Description=personalpeft learns while the machine is idle

[Service]
ExecStart={command}
{environment}Restart=on-failure
RestartSec=60
# A learn ends between two steps, which can take a while on a slow machine.
TimeoutStopSec=120
Nice=10
IOSchedulingClass=idle
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""

_LAUNCHD = """\
<!-- Save this as ~/Library/LaunchAgents/{label}.plist, then:
     launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{label}.plist -->
"""


def systemd(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a user unit for systemd that runs the command."""
    lines = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in environment.items()
    )
    return _SYSTEMD.format(label=LABEL, command=" ".join(map(_quoted, command)), environment=lines)


def launchd(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return an agent for launchd that runs the command."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 60,
        "ExitTimeOut": 120,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": 10,
        "Umask": 0o077,
    }
    head, _, rest = plistlib.dumps(agent, sort_keys=False).decode().partition("\n")
    return f"{head}\n{_LAUNCHD.format(label=LABEL)}{rest}"


def _quoted(text: str) -> str:
    """Return a word as systemd reads it, which expands per cent and dollar signs."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return (
        f'"{escaped}"'
        if escaped != text or not text or any(sign.isspace() for sign in text)
        else text
    )
