/*
 * delayline - a wide-area line in user space, for machines whose kernel has no netem.
 *
 * Opens one TUN device in each of two network namespaces and carries IP packets between them: through a queue of
 * bounded length in front of a line of a given rate, with independent random loss, and a one-way delay.
 *
 *   delayline NS_A IF_A NS_B IF_B DELAY_MS LOSS_PERCENT RATE_MBIT QUEUE_KB SEED LIFE_S
 *
 *   DELAY_MS      one way; a round trip takes twice as long
 *   LOSS_PERCENT  of the packets of each direction, drawn from SEED
 *   RATE_MBIT     0: no limit
 *   QUEUE_KB      what waits in front of the line; more is dropped from its tail (no meaning without a rate)
 *   LIFE_S        ends by itself after so long
 *
 * SIGUSR1 prints counters to standard error; SIGTERM and SIGINT print them and end it. The devices go with it.
 * It prints "ready" when both devices are there.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { PLACES = 1 << 16, PACKET_BYTES = 1600, BURST = 64 };

struct packet {
    int64_t due_ns;
    int length;
    unsigned char bytes[PACKET_BYTES];
};

struct line {
    const char *name;
    int source, target;
    struct packet *ring; /* places [first, last), by number modulo PLACES */
    unsigned first, last;
    int64_t free_ns; /* when the line has sent what it holds */
    uint64_t dice;
    uint64_t in, out, lost, overflowed, bytes;
};

static int64_t delay_ns, queue_ns;
static double loss, ns_per_byte;

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Uniform in [0, 1): Vigna's xorshift64*. */
static double roll(struct line *line)
{
    line->dice ^= line->dice >> 12;
    line->dice ^= line->dice << 25;
    line->dice ^= line->dice >> 27;
    return (double)((line->dice * 2685821657736338717ULL) >> 11) / 9007199254740992.0;
}

static int open_tun(const char *namespace, const char *name)
{
    char path[128];
    struct ifreq request = {0};
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
    int place = open(path, O_RDONLY | O_CLOEXEC);
    if (place < 0 || setns(place, CLONE_NEWNET) != 0) {
        fprintf(stderr, "delayline: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    close(place);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) != 0) {
        fprintf(stderr, "delayline: /dev/net/tun: %s\n", strerror(errno));
        exit(1);
    }
    return tun;
}

static void deliver(struct line *line, int64_t now)
{
    while (line->first != line->last) {
        struct packet *packet = &line->ring[line->first % PLACES];
        if (packet->due_ns > now)
            return;
        if (write(line->target, packet->bytes, packet->length) == packet->length) {
            line->out++;
            line->bytes += packet->length;
        } else {
            line->overflowed++;
        }
        line->first++;
    }
}

/* Takes one packet; false when none is there. */
static int take(struct line *line)
{
    static __thread unsigned char scratch[PACKET_BYTES];
    int full = line->last - line->first == PLACES;
    struct packet *packet = &line->ring[line->last % PLACES];
    int length = read(line->source, full ? scratch : packet->bytes, PACKET_BYTES);
    if (length <= 0)
        return 0;
    line->in++;
    if (loss > 0 && roll(line) < loss) {
        line->lost++;
        return 1;
    }
    int64_t now = now_ns(), start = line->free_ns > now ? line->free_ns : now;
    if (full || (ns_per_byte > 0 && start - now > queue_ns)) {
        line->overflowed++;
        return 1;
    }
    line->free_ns = start + (int64_t)(length * ns_per_byte);
    packet->due_ns = line->free_ns + delay_ns;
    packet->length = length;
    line->last++;
    return 1;
}

static void *carry(void *argument)
{
    struct line *line = argument;
    prctl(PR_SET_TIMERSLACK, 1000UL); /* 1 us: the default of 50 us would show in the delay */
    for (;;) {
        deliver(line, now_ns());
        int taken = 0;
        while (taken < BURST && take(line))
            taken++;
        if (taken)
            continue;
        struct pollfd wanted = {.fd = line->source, .events = POLLIN};
        struct timespec pause, *limit = NULL;
        if (line->first != line->last) {
            int64_t wait = line->ring[line->first % PLACES].due_ns - now_ns();
            if (wait < 0)
                wait = 0;
            pause = (struct timespec){wait / 1000000000LL, wait % 1000000000LL};
            limit = &pause;
        }
        ppoll(&wanted, 1, limit, NULL);
    }
    return NULL;
}

int main(int count, char **words)
{
    static struct line lines[2];
    if (count != 11) {
        fprintf(stderr, "delayline: the comment at the top of delayline.c says how\n");
        return 2;
    }
    delay_ns = (int64_t)(atof(words[5]) * 1e6);
    loss = atof(words[6]) / 100.0;
    ns_per_byte = atof(words[7]) > 0 ? 8000.0 / atof(words[7]) : 0;
    queue_ns = (int64_t)(atof(words[8]) * 1024 * ns_per_byte);
    uint64_t seed = strtoull(words[9], NULL, 10);
    alarm((unsigned)atoi(words[10]));

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);

    int a = open_tun(words[1], words[2]), b = open_tun(words[3], words[4]);
    lines[0] = (struct line){.name = "A to B", .source = a, .target = b};
    lines[1] = (struct line){.name = "B to A", .source = b, .target = a};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        lines[i].ring = malloc(sizeof(struct packet) * PLACES);
        lines[i].dice = (seed + 1) * 0x9E3779B97F4A7C15ULL + (uint64_t)i * 77 + 1;
        if (!lines[i].ring || pthread_create(&thread, NULL, carry, &lines[i]) != 0) {
            fprintf(stderr, "delayline: no memory or no thread\n");
            return 1;
        }
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        int signal_number;
        sigwait(&signals, &signal_number);
        for (int i = 0; i < 2; i++)
            fprintf(stderr, "%s: in=%lu out=%lu lost=%lu overflowed=%lu bytes=%lu\n", lines[i].name, lines[i].in,
                    lines[i].out, lines[i].lost, lines[i].overflowed, lines[i].bytes);
        if (signal_number != SIGUSR1)
            return 0;
    }
}
