"""Which programs are games, by where they lie and what they are called. Pure.

A game store's folder holds more than games: the store itself, which many keep open all day in the corner of the screen,
its overlay, wallpapers that move. Were these games, a typical gaming computer would never work.
"""

from __future__ import annotations

from node.owner.governor import cut_name

FOLDERS = (
    "/steamapps/common/",
    "/games/heroic/", "/heroic/tools/",  # what Heroic installs, and the Wine that runs it: not Heroic itself
    "/epic games/",
    "/gog galaxy/games/", "/gog games/",
    "/xboxgames/",
    "/riot games/",
    "/ea games/", "/origin games/",
    "/ubisoft game launcher/games/",
    # Battle.net has no folder for all: each of its games lies in one of its own.
    "/call of duty/", "/diablo ii resurrected/", "/diablo iii/", "/diablo iv/", "/hearthstone/",
    "/heroes of the storm/", "/overwatch/", "/starcraft ii/", "/warcraft iii/", "/world of warcraft/",
)  # fmt: skip
"""Programs that run from below these are games, whatever they are called. Lower case, with slashes."""
NO_GAME_FOLDERS = (
    "/steamapps/common/wallpaper_engine/", "/steamapps/common/steamworks shared/",
    "/epic games/launcher/", "/epic games/epic online services/", "/epic games/directxredist/",
    "/riot games/riot client/",
)  # fmt: skip
"""… but for these below them."""
LAUNCHERS = frozenset(
    cut_name(name)
    for name in (
        "steam", "steamwebhelper", "steamservice", "gameoverlayui", "gameoverlayui64",
        "wallpaper32", "wallpaper64", "webwallpaper32", "wallpaperservice32",
        "heroic", "legendary", "gogdl", "nile",
        "EpicGamesLauncher", "EpicWebHelper", "EOSOverlayRenderer-Win64-Shipping", "EpicOnlineServicesUserHelper",
        "GalaxyClient", "GalaxyClient Helper", "GOG Galaxy Notifications Renderer",
        "RiotClientServices", "RiotClientUx", "RiotClientUxRender", "Riot Client",
        "EADesktop", "EALauncher", "EABackgroundService", "Origin", "OriginWebHelperService",
        "upc", "UbisoftConnect", "UbisoftGameLauncher", "UplayWebCore",
        "Battle.net", "XboxPcApp", "GamingServices", "gamelaunchhelper",
    )
)  # fmt: skip
"""Stores, their overlays and their helpers, and wallpapers: no game wherever they lie, and however much they draw."""
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


def is_game(path: str, name: str) -> bool:
    """Whether the program of this path and name is a game by where it lies."""
    place = path.lower().replace("\\", "/")
    if cut_name(name) in LAUNCHERS or any(folder in place for folder in NO_GAME_FOLDERS):
        return False
    return any(folder in place for folder in FOLDERS)
