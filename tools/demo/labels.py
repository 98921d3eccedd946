"""Readable words for the labels of Debian's index: sections, and yes/no properties from debtags.

A package without any tag of a facet says nothing about that facet; only one that carries another tag of the
same facet counts as a no. That is as much as incomplete tags can say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from demo.index import Package

# Section: (names that the label may go by, what belongs there).
SECTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "admin": (
        ("system administration", "administration tools", "sysadmin"),
        "setting up and looking after a machine",
    ),
    "comm": (("communication", "phone, fax and modem", "telephony"), "telephones, modems and serial lines"),
    "database": (
        ("databases", "database software", "data storage servers"),
        "database servers, clients and their tools",
    ),
    "devel": (
        ("development tools", "software development", "programming tools"),
        "compilers, build tools and debuggers",
    ),
    "doc": (("documentation", "manuals and documentation", "docs"), "manuals, guides and reference pages"),
    "editors": (("text editors", "editors", "editing"), "programs that edit text, and their add-ons"),
    "electronics": (
        ("electronics", "electronics design", "circuit design"),
        "circuits, boards and microcontrollers",
    ),
    "fonts": (("fonts", "typefaces", "fonts and lettering"), "typefaces for screen and print"),
    "games": (("games", "games and amusements", "gaming"), "games, toys and their data"),
    "gnome": (("GNOME desktop", "GNOME", "GNOME programs"), "parts of the GNOME desktop"),
    "gnu-r": (("R packages", "GNU R", "R statistics"), "add-ons for the R language"),
    "golang": (("Go packages", "Go language", "golang"), "source libraries for the Go language"),
    "graphics": (
        ("graphics", "images and graphics", "pictures and drawing"),
        "viewing, drawing and converting pictures",
    ),
    "hamradio": (("amateur radio", "ham radio", "radio amateurs"), "radio modes, logs and stations"),
    "haskell": (("Haskell packages", "Haskell language", "Haskell"), "libraries for the Haskell language"),
    "httpd": (
        ("web servers", "HTTP servers", "web server modules"),
        "servers of web pages and their modules",
    ),
    "interpreters": (
        ("interpreters", "language interpreters", "scripting languages"),
        "programs that run a language, and its modules",
    ),
    "introspection": (
        ("GObject introspection", "introspection data", "typelib data"),
        "typelib files for language bindings",
    ),
    "java": (("Java packages", "Java language", "Java"), "libraries and programs in Java"),
    "javascript": (
        ("JavaScript packages", "JavaScript", "Node.js modules"),
        "modules for Node.js and browsers",
    ),
    "kde": (("KDE desktop", "KDE", "KDE programs"), "parts of the KDE desktop"),
    "kernel": (
        ("kernel", "Linux kernel and modules", "operating system kernel"),
        "kernel images, modules and headers",
    ),
    "libdevel": (
        ("library development files", "development libraries", "C headers"),
        "headers and static libraries to build against",
    ),
    "libs": (("shared libraries", "libraries", "runtime libraries"), "libraries that programs need to run"),
    "lisp": (("Lisp packages", "Lisp language", "Lisp and Emacs Lisp"), "libraries in Lisp dialects"),
    "localization": (("translations", "localization", "language packs"), "translated messages and help"),
    "mail": (("mail", "e-mail", "e-mail programs"), "reading, sending and filtering mail"),
    "math": (("mathematics", "math software", "maths"), "numerical and symbolic mathematics"),
    "net": (("networking", "network programs", "network tools"), "clients, daemons and tools of the network"),
    "ocaml": (("OCaml packages", "OCaml language", "OCaml"), "libraries for the OCaml language"),
    "perl": (("Perl packages", "Perl modules", "Perl language"), "modules for the Perl language"),
    "php": (("PHP packages", "PHP language", "PHP"), "libraries and extensions for PHP"),
    "python": (("Python packages", "Python modules", "Python language"), "modules for the Python language"),
    "ruby": (("Ruby packages", "Ruby language", "Ruby gems"), "libraries for the Ruby language"),
    "rust": (("Rust packages", "Rust crates", "Rust language"), "crates for the Rust language"),
    "science": (
        ("science", "scientific software", "research"),
        "biology, physics, chemistry and other sciences",
    ),
    "sound": (("sound and music", "audio", "sound"), "playing, recording and making sound"),
    "tex": (("TeX and LaTeX", "TeX typesetting", "LaTeX"), "typesetting with TeX and its formats"),
    "text": (
        ("text processing", "text tools", "documents and text"),
        "converting, formatting and searching text",
    ),
    "utils": (
        ("utilities", "small utilities", "everyday utilities"),
        "small tools for files, devices and the desktop",
    ),
    "vcs": (
        ("version control", "version control systems", "source code management"),
        "keeping the history of files",
    ),
    "video": (
        ("video", "video players and editors", "film and video"),
        "playing, recording and editing video",
    ),
    "web": (("web software", "web applications", "the web"), "browsers, web applications and site tools"),
    "x11": (
        ("X11 and windows", "graphical desktop (X11)", "X Window System"),
        "window managers and desktop accessories",
    ),
}

LANGUAGES = {
    "c": "C", "c++": "C++", "python": "Python", "perl": "Perl", "java": "Java", "ruby": "Ruby", "shell": "shell script",
    "lisp": "Lisp", "ocaml": "OCaml", "php": "PHP", "haskell": "Haskell", "tcl": "Tcl", "ecmascript": "JavaScript",
    "objc": "Objective-C", "c-sharp": "C#", "scheme": "Scheme", "lua": "Lua", "fortran": "Fortran", "r": "R",
}  # fmt: skip
SECTION_LANGUAGE = {
    "python": "Python", "perl": "Perl", "java": "Java", "ruby": "Ruby", "haskell": "Haskell", "rust": "Rust",
    "golang": "Go", "php": "PHP", "ocaml": "OCaml", "gnu-r": "R", "javascript": "JavaScript",
}  # fmt: skip
ROLES = {
    "program": "a program to run", "shared-lib": "a shared library", "devel-lib": "development files of a library",
    "documentation": "documentation", "app-data": "data for an application", "plugin": "a plugin",
    "debug-symbols": "debug symbols", "metapackage": "a metapackage",
}  # fmt: skip
INTERFACES = {
    "graphical": "graphical windows", "commandline": "the command line", "text-mode": "full-screen text",
    "daemon": "none, it runs in the background", "web": "a web page", "shell": "its own shell",
}  # fmt: skip

# Debtag: ways to finish "Is this …?".
IS_TAGS: dict[str, tuple[str, ...]] = {
    "role::program": ("a program that a user can run", "an executable program"),
    "role::shared-lib": ("a shared library", "a runtime library for other programs"),
    "role::devel-lib": ("meant for compiling other software", "a set of library development files"),
    "role::documentation": ("a package of documentation", "only documentation"),
    "role::app-data": ("data that belongs to an application", "application data"),
    "role::plugin": ("a plugin or add-on", "an add-on for another program"),
    "implemented-in::c": ("written in C",), "implemented-in::c++": ("written in C++",),
    "implemented-in::python": ("written in Python",), "implemented-in::perl": ("written in Perl",),
    "implemented-in::java": ("written in Java",), "implemented-in::lisp": ("written in Lisp",),
    "implemented-in::shell": ("a shell script", "written in shell"),
    "interface::commandline": ("used from the command line", "a command line tool"),
    "interface::graphical": ("a graphical program", "a program with windows and a mouse"),
    "interface::daemon": ("a daemon", "a background service"),
    "interface::text-mode": ("a full-screen text program", "used in a text terminal"),
    "interface::web": ("used through a web browser",),
    "uitoolkit::gtk": ("built with GTK", "a GTK program"), "uitoolkit::qt": ("built with Qt", "a Qt program"),
    "uitoolkit::ncurses": ("built with ncurses",), "uitoolkit::sdl": ("built with SDL",),
    "suite::kde": ("part of KDE",), "suite::gnome": ("part of GNOME",),
    "suite::gnu": ("part of the GNU project",),
    "suite::emacs": ("for Emacs", "an Emacs package"), "suite::openstack": ("part of OpenStack",),
    "game::arcade": ("an arcade game",), "game::puzzle": ("a puzzle game", "a puzzle"),
    "game::board": ("a board game",), "game::strategy": ("a strategy game",),
    "game::toys": ("a toy or gimmick",),
    "field::mathematics": ("for mathematics", "about mathematics"),
    "field::biology": ("for biology", "about biology"),
    "field::finance": ("for finance", "about money and accounting"), "field::statistics": ("for statistics",),
    "field::geography": ("for maps and geography",), "field::physics": ("for physics",),
    "field::chemistry": ("for chemistry",), "field::electronics": ("for electronics",),
    "field::astronomy": ("for astronomy",), "field::medicine": ("for medicine",),
    "field::linguistics": ("for linguistics",),
    "network::server": ("a network server", "a server"), "network::client": ("a network client", "a client"),
    "security::authentication": ("about logging in and authentication",),
    "security::cryptography": ("about encryption",),
    "x11::font": ("a font for X",), "made-of::dictionary": ("a dictionary or word list",),
    "made-of::html": ("made of HTML pages",),
    "admin::virtualization": ("about virtual machines or containers",),
    "admin::filesystem": ("about file systems",),
    "admin::backup": ("for backups", "a backup tool"),
    "admin::package-management": ("for managing packages",),
    "devel::compiler": ("a compiler",), "devel::debugger": ("a debugger", "for debugging programs"),
    "devel::testing-qa": ("for testing software",), "devel::interpreter": ("an interpreter",),
}  # fmt: skip
# Debtag: ways to finish "Does it …?".
DOES_TAGS: dict[str, tuple[str, ...]] = {
    "works-with::text": ("work with text", "handle text"),
    "works-with::audio": ("work with audio", "handle sound"),
    "works-with::image": ("work with images", "handle pictures"),
    "works-with::mail": ("work with e-mail", "handle mail"),
    "works-with::video": ("work with video", "handle video"), "works-with::db": ("work with databases",),
    "works-with::file": ("work with files", "manage files"), "works-with::archive": ("work with archives",),
    "works-with::software:source": ("work with source code",),
    "works-with::network-traffic": ("look at network traffic",),
    "works-with::logfile": ("read log files",), "works-with::software:package": ("handle software packages",),
    "use::converting": ("convert something", "convert data to another form"),
    "use::editing": ("edit something",),
    "use::checking": ("check or verify something",),
    "use::viewing": ("show or display something", "let the user view data"),
    "use::monitor": ("monitor something", "watch a system's activity"),
    "use::configuring": ("configure something",),
    "use::searching": ("search for something",), "use::downloading": ("download things",),
    "use::organizing": ("help to organize things",),
    "use::playing": ("play media",), "use::learning": ("help people to learn",),
    "use::compressing": ("compress data",),
    "use::synchronizing": ("synchronize data",), "use::chatting": ("let people chat",),
    "use::scanning": ("scan something",),
    "works-with-format::html": ("read or write HTML",), "works-with-format::xml": ("read or write XML",),
    "works-with-format::tex": ("use TeX files",), "works-with-format::mp3": ("support MP3 files",),
    "works-with-format::pdf": ("read or write PDF",), "works-with-format::png": ("support PNG images",),
    "protocol::http": ("speak HTTP",), "protocol::ssl": ("use TLS or SSL",),
    "protocol::smtp": ("speak SMTP",),
    "protocol::ssh": ("use SSH",), "protocol::ftp": ("speak FTP",), "protocol::dns": ("use DNS",),
}  # fmt: skip

CALM = frozenset(
    {"games", "fonts", "math", "graphics", "sound", "doc", "editors", "electronics", "tex", "text", "science"}
)
NETWORKED = frozenset({"net", "mail", "web", "httpd"})
FOR_DEVELOPERS = frozenset(SECTION_LANGUAGE) | {
    "libdevel",
    "devel",
    "libs",
    "interpreters",
    "vcs",
    "lisp",
    "introspection",
}


@dataclass(frozen=True)
class Property:
    """Something that is true or false of a package; `holds` is None where the index does not say."""

    phrases: tuple[str, ...]
    is_a: bool
    holds: Callable[[Package], bool | None]


def facet(tag: str) -> str:
    """The part before the two colons."""
    return tag.partition("::")[0]


def from_tag(tag: str) -> Callable[[Package], bool | None]:
    """Yes with the tag (or a finer one), no with others of its facet, unknown without any."""

    def holds(package: Package) -> bool | None:
        if any(own == tag or own.startswith(tag + ":") for own in package.tags):
            return True
        return False if any(facet(own) == facet(tag) for own in package.tags) else None

    return holds


def from_sections(
    sections: Iterable[str], among: Iterable[str] | None = None
) -> Callable[[Package], bool | None]:
    """Yes in one of `sections`; no in one of `among` (any other section by default), else unknown."""
    yes, no = frozenset(sections), None if among is None else frozenset(among)

    def holds(package: Package) -> bool | None:
        if package.section in yes:
            return True
        return False if no is None or package.section in no else None

    return holds


def needs_network(package: Package) -> bool | None:
    """Tags of network or protocol facets, or a section about the network; no in sections that live without."""
    facets = {facet(tag) for tag in package.tags}
    if facets & {"network", "protocol"} or package.section in NETWORKED:
        return True
    return False if package.section in CALM else None


def _by_section() -> list[Property]:
    """What a package's section tells, and whether it needs a network."""
    return [
        Property(
            ("a game", "a game or something for a game", "for playing games"), True, from_sections(["games"])
        ),
        Property(("documentation", "a manual or other documentation"), True, from_sections(["doc"])),
        Property(("a font", "a typeface"), True, from_sections(["fonts"])),
        Property(
            ("a library", "a shared library or its development files"),
            True,
            from_sections(["libs", "libdevel"]),
        ),
        Property(
            ("for developers", "meant for programmers"),
            True,
            from_sections(FOR_DEVELOPERS, CALM | NETWORKED | {"admin", "x11", "utils"}),
        ),
        Property(
            ("scientific software", "for scientists"),
            True,
            from_sections(["science"], set(SECTIONS) - {"math", "gnu-r", "python", "libs", "doc"}),
        ),
        Property(
            ("for system administrators", "a tool for administrators"),
            True,
            from_sections(["admin"], set(SECTIONS) - {"utils", "net", "kernel"}),
        ),
        Property(
            ("about sound or music", "audio software"),
            True,
            from_sections(["sound"], set(SECTIONS) - {"libs", "libdevel", "video"}),
        ),
        Property(
            ("about mail", "mail software"),
            True,
            from_sections(["mail"], set(SECTIONS) - {"net", "perl", "python"}),
        ),
        Property(("need a network", "use the network", "need an internet connection"), False, needs_network),
    ]


def properties() -> tuple[Property, ...]:
    """Every yes/no property."""
    by_language = [
        Property(
            (f"for {language} programmers", f"a {language} package", f"about the {language} language"),
            True,
            from_sections([section]),
        )
        for section, language in SECTION_LANGUAGE.items()
    ]
    tagged = [Property(phrases, True, from_tag(tag)) for tag, phrases in IS_TAGS.items()]
    tagged += [Property(phrases, False, from_tag(tag)) for tag, phrases in DOES_TAGS.items()]
    return tuple(_by_section() + by_language + tagged)


def section_words(section: str, wording: int) -> tuple[str, str]:
    """A name of a section and what belongs there; `wording` picks among its names."""
    names, description = SECTIONS[section]
    return names[wording % len(names)], description


def single(package: Package, wanted: str, words: dict[str, str]) -> str | None:
    """The words of the only tag of one facet; None with none or several."""
    found = [tag.partition("::")[2] for tag in package.tags if facet(tag) == wanted]
    return words.get(found[0]) if len(found) == 1 else None


def language(package: Package) -> str | None:
    """The language that the package is written in or for, where section and tags agree on one."""
    by_section = SECTION_LANGUAGE.get(package.section)
    by_tag = single(package, "implemented-in", LANGUAGES)
    if by_section and by_tag and by_section != by_tag:
        return None
    return by_section or by_tag
