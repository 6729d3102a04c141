"""Which programs are no game, though they use the GPU as one does."""

from __future__ import annotations

from node.owner.governor import cut_name

DESKTOP = frozenset(
    cut_name(name)
    for name in (
        "gnome-shell", "mutter", "kwin_wayland", "kwin_x11", "plasmashell", "cinnamon", "sway", "hyprland", "weston",
        "xorg", "xwayland", "dwm", "explorer",
        "firefox", "firefox-bin", "librewolf", "chrome", "chromium", "chromium-browser", "brave", "msedge", "opera",
        "vivaldi-bin", "vivaldi", "electron", "code", "discord", "slack", "spotify",
    )
)  # fmt: skip
"""What draws every desktop, and programs that lie open all day: on large screens each may hold over 500 MB."""
