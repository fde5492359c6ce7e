#!/usr/bin/env bash
# Throw-away test hosts: N nspawn machines (own systemd, own sshd, own address), joined by a bridge
# in a network namespace with no route out of it.
#
#   testbed.sh base                 builds the base tree (cached), prints its path
#   testbed.sh up [N]               starts N hosts
#   testbed.sh down                 ends them and removes everything of this tag
#   testbed.sh exec COMMAND...      runs a command in the controller's namespace
#   testbed.sh ssh I COMMAND...     runs a command on host I
#   testbed.sh unplug|plug I        takes host I off the network, or puts it back
#   testbed.sh ip I                 prints the address of host I
#
# V100_TB_TAG names this run (at most 8 characters), V100_TB_STATE is its folder (a tmpfs is mounted
# there), V100_TB_NET its /24, V100_TB_BIND_RO a list of FOLDER:PLACE that hosts see read-only.
set -euo pipefail
TAG=${V100_TB_TAG:?a name for this run}
STATE=${V100_TB_STATE:?a folder for this run}
NET=${V100_TB_NET:-198.18.77}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-v100/deploy-base
HERE=$(cd "$(dirname "$0")" && pwd)
PACKAGES=systemd-sysv,dbus,libpam-systemd,openssh-server,sudo,python3-minimal,python3-venv,python3-apt
PACKAGES+=,iproute2,procps,acl,curl,ca-certificates,haproxy,libnuma1,libgomp1,gawk
SOURCES=/etc/apt/sources.list.d/debian.sources

log() { printf '[testbed] %s\n' "$*" >&2; }

base() { # prints the base tree; builds it once per package list and hook
  local key tree
  key=$({ echo "$PACKAGES"; cat "$HERE/customize.sh"; } | sha256sum | cut -c1-12)
  tree=$CACHE/$key
  if [[ ! -d $tree ]]; then
    mkdir -p "$CACHE"
    rm -rf "$tree".part.*
    local part=$tree.part.$$
    mmdebstrap --quiet --mode=root --variant=minbase --include="$PACKAGES" \
      --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' \
      --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook="$HERE/customize.sh \"\$1\"" bookworm "$part" "$SOURCES" >&2
    mv "$part" "$tree"
    log "base tree built in $SECONDS s: $(du -sh "$tree" | cut -f1)"
  fi
  echo "$tree"
}

own_cgroup() { # moves this (sub)shell into a cgroup of its own; two hosts in one would share units
  local controllers root
  while IFS=: read -r _ controllers _; do
    case $controllers in
      '')
        root=/sys/fs/cgroup/unified
        [[ -d $root ]] || root=/sys/fs/cgroup
        ;;
      name=systemd) root=/sys/fs/cgroup/systemd ;;
      *) continue ;;
    esac
    [[ -d $root ]] || continue
    mkdir -p "$root/$TAG-$1"
    echo "$BASHPID" > "$root/$TAG-$1/cgroup.procs"
  done < /proc/self/cgroup
}

up() {
  local count=${1:-2} tree i
  tree=$(base)
  mkdir -p "$STATE"
  # the hosts' writes stay in memory: no fsync waits for this machine's disk
  mountpoint -q "$STATE" || mount -t tmpfs -o size=5g,mode=755 "$TAG" "$STATE"
  ssh-keygen -q -t ed25519 -N '' -C testbed -f "$STATE/key"
  ip netns add "$TAG-ctl"
  ip -n "$TAG-ctl" link set lo up
  ip -n "$TAG-ctl" link add br0 type bridge
  ip -n "$TAG-ctl" addr add "$NET.1/24" dev br0
  ip -n "$TAG-ctl" link set br0 up
  : > "$STATE/known_hosts"
  echo "$count" > "$STATE/count"
  for ((i = 1; i <= count; i++)); do add_node "$i" "$tree"; done
  for ((i = 1; i <= count; i++)); do wait_node "$i"; done
  log "$count hosts up in $SECONDS s"
}

add_node() { # root file system, keys, network of host $1 over tree $2
  local i=$1 folder=$STATE/n$1 root
  mkdir -p "$folder"/{up,work,root}
  root=$folder/root
  mount -t overlay "$TAG-n$i" -o "lowerdir=$2,upperdir=$folder/up,workdir=$folder/work" "$root"
  echo "node$i" > "$root/etc/hostname"
  printf '127.0.0.1 localhost\n%s node%s\n' "$NET.1$i" "$i" > "$root/etc/hosts"
  install -d -o 1000 -g 1000 -m 700 "$root/home/deploy/.ssh"
  install -o 1000 -g 1000 -m 600 "$STATE/key.pub" "$root/home/deploy/.ssh/authorized_keys"
  rm -f "$root"/etc/ssh/ssh_host_*
  ssh-keygen -q -t ed25519 -N '' -C "node$i" -f "$root/etc/ssh/ssh_host_ed25519_key"
  echo "$NET.1$i $(cut -d' ' -f1,2 "$root/etc/ssh/ssh_host_ed25519_key.pub")" >> "$STATE/known_hosts"
  ip netns add "$TAG-n$i"
  ip link add "ve$i" netns "$TAG-ctl" type veth peer name host0 netns "$TAG-n$i"
  ip -n "$TAG-ctl" link set "ve$i" master br0 up
  ip -n "$TAG-n$i" link set lo up
  ip -n "$TAG-n$i" addr add "$NET.1$i/24" dev host0
  ip -n "$TAG-n$i" link set host0 up
  keep_node "$i"
}

keep_node() { # a keeper per host: nspawn with --keep-unit ends with 133 when its host reboots
  local i=$1 folder=$STATE/n$1 binds=() path
  for path in ${V100_TB_BIND_RO:-}; do binds+=("--bind-ro=$path"); done
  (
    own_cgroup "n$i"
    export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
    while :; do
      setsid systemd-nspawn --quiet --keep-unit --register=no -M "node$i" -D "$folder/root" -b \
        --network-namespace-path="/run/netns/$TAG-n$i" --resolv-conf=off --timezone=off \
        --capability=all --system-call-filter=bpf --link-journal=no "${binds[@]}" \
        >> "$folder/console.log" 2>&1 < /dev/null &
      echo $! > "$folder/nspawn.pid"
      status=0
      wait $! || status=$?
      [[ $status == 133 ]] || exit "$status"
    done
  ) > /dev/null 2>&1 < /dev/null &
  echo $! > "$folder/keeper.pid"
}

wait_node() {
  local i=$1 k
  for ((k = 0; k < 300; k++)); do
    in_netns timeout 1 bash -c "exec 3<>/dev/tcp/$NET.1$i/22 && head -c4 <&3" 2> /dev/null \
      | grep -q SSH- && break
    if [[ ! -d /proc/$(cat "$STATE/n$i/keeper.pid") ]]; then
      log "host $i died, this machine cannot boot nspawn hosts:"
      tail -20 "$STATE/n$i/console.log" >&2
      return 1
    fi
    sleep 0.1
  done
  on_node "$i" systemctl is-system-running --wait > /dev/null || {
    on_node "$i" systemctl --failed --no-pager >&2
    return 1
  }
}

in_netns() { ip netns exec "$TAG-ctl" "$@"; }

on_node() {
  local i=$1
  shift
  in_netns ssh -q -i "$STATE/key" -o UserKnownHostsFile="$STATE/known_hosts" \
    -o StrictHostKeyChecking=yes -o BatchMode=yes "deploy@$NET.1$i" "$@"
}

end_node() { # pulls the plug: the end of a host's init ends its whole process namespace
  local folder=$1 keeper nspawn init k
  keeper=$(cat "$folder/keeper.pid" 2> /dev/null || echo 0)
  for ((k = 0; k < 100; k++)); do
    [[ $keeper != 0 && -d /proc/$keeper ]] || break
    nspawn=$(cat "$folder/nspawn.pid" 2> /dev/null || echo 0)
    for init in $(pgrep -P "$nspawn" 2> /dev/null); do kill -9 "$init" 2> /dev/null || true; done
    sleep 0.1
  done
}

down() {
  local folder name root
  for folder in "$STATE"/n[0-9]*; do
    [[ -d $folder ]] || continue
    name=${folder##*/}
    end_node "$folder"
    umount "$folder/root" 2> /dev/null || umount -l "$folder/root" 2> /dev/null || true
    ip netns del "$TAG-$name" 2> /dev/null || true
    for root in /sys/fs/cgroup/unified /sys/fs/cgroup/systemd /sys/fs/cgroup; do
      if [[ -d $root/$TAG-$name ]]; then
        find "$root/$TAG-$name" -depth -type d -exec rmdir {} \; 2> /dev/null || true
      fi
    done
  done
  ip netns del "$TAG-ctl" 2> /dev/null || true
  if mountpoint -q "$STATE"; then umount "$STATE" 2> /dev/null || umount -l "$STATE"; fi
  rm -rf --one-file-system "$STATE"
}

command=${1:-help}
shift || true
case $command in
  base) base ;;
  up) up "$@" ;;
  down) down ;;
  exec) in_netns "$@" ;;
  ssh) on_node "$@" ;;
  unplug) ip -n "$TAG-ctl" link set "ve$1" down ;;
  plug) ip -n "$TAG-ctl" link set "ve$1" up ;;
  ip) echo "$NET.1$1" ;;
  *)
    sed -n 2,15p "$0"
    exit 2
    ;;
esac
