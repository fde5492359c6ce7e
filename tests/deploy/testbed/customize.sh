#!/bin/sh
# Customize hook of mmdebstrap ($1 is the tree): what every test host has. Nothing here is real GPU
# software; every stand-in says "fake" where a test or a person would look.
set -eu
R=$1
chroot "$R" useradd -m -u 1000 -s /bin/bash deploy
echo 'deploy ALL=(ALL) NOPASSWD:ALL' > "$R/etc/sudoers.d/deploy"
chmod 440 "$R/etc/sudoers.d/deploy"
: > "$R/etc/machine-id"
# quiet, quick boots: no timers that would reach for a network, no proxy of the distribution
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
  fstrim.timer console-getty.service haproxy.service; do
  ln -sf /dev/null "$R/etc/systemd/system/$unit"
done
printf 'UseDNS no\nPasswordAuthentication no\n' > "$R/etc/ssh/sshd_config.d/testbed.conf"

# Fake device nodes. 10:229 (fuse) opens freely and is not among the devices that
# DevicePolicy=closed admits, so DeviceAllow= of the unit under test really decides.
{
  for i in 0 1 2 3; do echo "c! /dev/nvidia$i 0666 root root - 10:229"; done
  for d in nvidiactl nvidia-uvm nvidia-uvm-tools; do echo "c! /dev/$d 0666 root root - 10:229"; done
} > "$R/etc/tmpfiles.d/fake-nvidia.conf"

# Fake nvidia-smi: answers --query-gpu=FIELDS and --query-compute-apps; knobs in fake-nvidia.conf.
cat > "$R/usr/bin/nvidia-smi" <<'S'
#!/bin/bash
# fake nvidia-smi of the test hosts
N=4 NAME='Tesla V100-SXM2-32GB' CC=7.0 DRIVER=570.124.06 MEM=32768 USED=0 APPS=
[ -f /etc/fake-nvidia.conf ] && . /etc/fake-nvidia.conf
unit=' MiB'
case "$*" in *nounits*) unit= ;; esac
for argument; do
  case $argument in
    --query-compute-apps=*) [ -z "$APPS" ] || echo "$APPS"; exit 0 ;;
    --query-gpu=*) fields=${argument#*=} ;;
  esac
done
for ((i = 0; i < N; i++)); do
  row=
  for field in ${fields//,/ }; do
    case $field in
      index) value=$i ;;
      uuid) value=GPU-fake-$i ;;
      name) value=$NAME ;;
      compute_cap) value=$CC ;;
      driver_version) value=$DRIVER ;;
      memory.total) value=$MEM$unit ;;
      memory.used) value=$USED$unit ;;
      pci.bus_id) value=00000000:0$((i + 1)):00.0 ;;
      *) value='[fake: unknown field]' ;;
    esac
    row+="${row:+, }$value"
  done
  echo "$row"
done
S
# Fake CUDA toolkit and compiler: the tests look for them on PATH, nothing is compiled with them.
mkdir -p "$R/usr/local/cuda-12.8/bin"
for tool in nvcc ptxas; do
  printf '#!/bin/sh\necho "fake %s, release 12.8"\n' "$tool" > "$R/usr/local/cuda-12.8/bin/$tool"
done
ln -s cuda-12.8 "$R/usr/local/cuda"
printf '#!/bin/sh\necho "fake c++"\n' > "$R/usr/local/bin/c++"
chmod +x "$R/usr/bin/nvidia-smi" "$R"/usr/local/cuda-12.8/bin/* "$R/usr/local/bin/c++"
# The model of the fake profile.
mkdir -p "$R/srv/models/demo"
echo '{"fake": true}' > "$R/srv/models/demo/config.json"
