"""What lies in a game store's folder and is a game, and what lies there and is none."""

from __future__ import annotations

import pytest

from node.platform.games import is_game

PROGRAMS = [
    (r"C:\Program Files (x86)\Steam\steamapps\common\Half-Life 2\hl2.exe", True),
    (r"D:\SteamLibrary\SteamApps\Common\Cyberpunk 2077\bin\x64\Cyberpunk2077.exe", True),
    ("/home/me/.local/share/Steam/steamapps/common/Proton 9.0/files/bin/wine64-preloader", True),
    ("/home/me/Games/Heroic/Hades/Hades", True),
    ("/home/me/.config/heroic/tools/wine/Wine-GE-8/bin/wine64-preloader", True),
    (r"C:\Program Files\Epic Games\Fortnite\FortniteGame\Binaries\Win64\FortniteClient-Win64-Shipping.exe", True),
    (r"C:\Program Files (x86)\GOG Galaxy\Games\Witcher 3\bin\x64\witcher3.exe", True),
    (r"C:\GOG Games\Gwent\Gwent.exe", True),
    (r"C:\XboxGames\Forza Horizon 5\Content\ForzaHorizon5.exe", True),
    (r"C:\Riot Games\VALORANT\live\ShooterGame\Binaries\Win64\VALORANT-Win64-Shipping.exe", True),
    (r"C:\Riot Games\League of Legends\Game\League of Legends.exe", True),
    (r"C:\Program Files\EA Games\Apex\r5apex.exe", True),
    (r"C:\Program Files (x86)\Ubisoft\Ubisoft Game Launcher\games\Far Cry 6\bin\FarCry6.exe", True),
    (r"C:\Program Files (x86)\Overwatch\_retail_\Overwatch.exe", True),
    (r"D:\World of Warcraft\_retail_\Wow.exe", True),
    (r"C:\Program Files (x86)\Call of Duty\_retail_\cod.exe", True),
    # what is open all day
    (r"C:\Program Files (x86)\Steam\steam.exe", False),
    (r"C:\Program Files (x86)\Steam\bin\cef\cef.win7x64\steamwebhelper.exe", False),
    (r"C:\Program Files (x86)\Steam\steamapps\common\wallpaper_engine\wallpaper64.exe", False),
    (r"D:\SteamLibrary\steamapps\common\wallpaper_engine\bin\ui32.exe", False),
    (r"C:\Program Files (x86)\Epic Games\Launcher\Portal\Binaries\Win64\EpicGamesLauncher.exe", False),
    (r"C:\Program Files (x86)\Epic Games\Launcher\Engine\Binaries\Win64\EpicWebHelper.exe", False),
    (
        r"C:\Program Files (x86)\Epic Games\Launcher\Portal\Extras\Overlay\EOSOverlayRenderer-Win64-Shipping.exe",
        False,
    ),
    (r"C:\Program Files (x86)\Epic Games\Epic Online Services\EpicOnlineServicesUserHelper.exe", False),
    ("/opt/Heroic/heroic", False),
    ("/app/bin/heroic/heroic", False),
    ("/opt/Heroic/resources/app.asar.unpacked/build/bin/linux/legendary", False),
    (r"C:\Users\me\AppData\Local\Programs\heroic\Heroic.exe", False),
    (r"C:\Program Files (x86)\GOG Galaxy\GalaxyClient.exe", False),
    (r"C:\Riot Games\Riot Client\RiotClientServices.exe", False),
    (r"C:\Riot Games\Riot Client\UX\RiotClientUx.exe", False),
    (r"C:\Program Files\Electronic Arts\EA Desktop\EA Desktop\EADesktop.exe", False),
    (r"C:\Program Files (x86)\Ubisoft\Ubisoft Game Launcher\upc.exe", False),
    (r"C:\Program Files (x86)\Battle.net\Battle.net.exe", False),
    ("/usr/bin/python3.11", False),
    ("", False),
]


@pytest.mark.parametrize(("path", "expected"), PROGRAMS)
def test_games_are_told_from_what_sells_them(path: str, expected: bool) -> None:
    """A store in the tray, its overlay and a wallpaper that moves were games, and a gaming computer never worked; what
    other stores install was none."""
    name = path.replace("\\", "/").rpartition("/")[2]
    assert is_game(path, name) is expected


def test_a_launcher_is_none_in_any_folder() -> None:
    """Some stores install themselves where their games go."""
    assert not is_game(r"C:\XboxGames\Some Game\Content\gamelaunchhelper.exe", "gamelaunchhelper.exe")
