# What natbed and wan have in common; they source it. Both work as root with network namespaces of fixed names, and keep
# a folder in between for whoever watches over them.

# Root writes, kills by and runs what lies in the folder $RUN, which is in /tmp unless told: so it must be of our own
# making. Somebody else could have laid a link there, or a program under the name of ours.
is_own() { [ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && [ -z "$(find "$1" -maxdepth 0 -perm /022)" ]; }
own_folder() {
    mkdir -p -m 0700 "$1" 2>/dev/null || true
    is_own "$1" || die "$1 is not a folder that belongs to this user alone; name another one with $2"
}

# From now on this script's end takes everything with it, whatever ends it: half a bed is no bed. `trap - EXIT` keeps it.
leave_nothing() {
    trap down EXIT
    trap 'exit 130' INT
    trap 'exit 143' HUP TERM
}

# claim PREFIX: the namespaces that are built now are those of $RUN. A watchdog of another bed, whose owner was killed,
# would otherwise end them: their names are the same.
claim() { echo "$RUN" >"/run/barnraise-${1}owner"; }
is_claimed() { [ "$(cat "/run/barnraise-${1}owner" 2>/dev/null)" = "$RUN" ]; }

# namespaces PREFIX: those that there are
namespaces() { ip netns list 2>/dev/null | awk -v prefix="$1" 'index($1, prefix) == 1 {print $1}'; }

inhabitants() {
    local ns
    for ns in $(namespaces "$1"); do ip netns pids "$ns"; done
}

# remove_namespaces PREFIX: with what lives in them, and nothing else. Who does not end when asked to is killed: in a
# namespace that has no name any more nobody would find it again.
remove_namespaces() {
    local ns pid living
    living=$(inhabitants "$1")
    for pid in $living; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 40); do # two seconds
        for pid in $living; do [ -e "/proc/$pid/ns/net" ] && break 1 || pid=""; done
        [ -n "${pid:-}" ] || break
        sleep 0.05
    done
    [ -z "$living" ] || for pid in $(inhabitants "$1"); do kill -KILL "$pid" 2>/dev/null || true; done
    for ns in $(namespaces "$1"); do ip netns del "$ns" || true; done
}
