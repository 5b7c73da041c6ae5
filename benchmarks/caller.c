/* Send one HTTP request again and again, and tell how each ended: as an open loop, which does not slow down with the
 * server, or as a closed one. A process of its own and not Python, so that it can offer more than any server takes.
 *
 * caller PORT FILE SLO_MS SECONDS CONNECTIONS RATE SEED PATIENCE_MS
 *
 * FILE holds the bytes of the request. RATE: requests per second, with exponential gaps; each is sent when it is due,
 * on an idle connection, else on a new one, else, with CONNECTIONS of them open, on the first that is free. Its latency
 * counts from when it was due. RATE 0: each of the CONNECTIONS sends again as soon as it has a response. PATIENCE_MS:
 * a request that no connection was free for in that time is given up; negative: it waits for ever.
 * The result is one JSON object; latencies are in milliseconds. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 4096, EVENTS = 1024, GRACE_NS = 2000000000 };

typedef struct {
    int fd;
    int busy;        /* a request is on its way */
    int connected;
    int64_t due;     /* when that request was to be sent, ns */
    size_t sent;
    size_t filled;   /* bytes of the response's head so far */
    int64_t left;    /* bytes of its body to come; -1 while the head is incomplete */
    int status;
    int closes;
    char head[HEAD + 1];
} Connection;

typedef struct { double *values; size_t count, room; } Samples;

static Connection *connections, **idle;
static int *unused;
static size_t idle_count, unused_count;
static char *request;
static size_t request_size;
static int epoll, closed_loop;
static struct sockaddr_in address;
static int64_t *backlog; /* due times of requests that no connection is free for: a ring */
static size_t backlog_first, backlog_count, backlog_room;
static Samples served, rejected, lag;
static size_t sent, within, other, failed, given_up, connects;
static double slo_ns, patience_ns;
static int64_t stop_at;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void add(Samples *samples, double value) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 4096;
        samples->values = realloc(samples->values, samples->room * sizeof(double));
    }
    samples->values[samples->count++] = value;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(Samples *samples, double q) {
    if (!samples->count) return 0;
    qsort(samples->values, samples->count, sizeof(double), compare);
    size_t at = (size_t)(q * (double)samples->count);
    return samples->values[at < samples->count ? at : samples->count - 1] / 1e6;
}

static void drop(Connection *connection) {
    if (!connection->busy && connection->connected)
        for (size_t n = 0; n < idle_count; n++)
            if (idle[n] == connection) { idle[n] = idle[--idle_count]; break; }
    close(connection->fd);
    connection->fd = -1;
    connection->busy = connection->connected = 0;
    unused[unused_count++] = (int)(connection - connections);
}

static int open_one(int64_t due);

static void fail(Connection *connection) {
    int lost = connection->busy;
    int64_t now = now_ns();
    drop(connection);
    if (!lost) return;
    failed++;
    if (closed_loop && now < stop_at) { sent++; open_one(now); }
}

static void write_some(Connection *connection) {
    while (connection->sent < request_size) {
        ssize_t count = write(connection->fd, request + connection->sent, request_size - connection->sent);
        if (count < 0) {
            if (errno != EAGAIN) fail(connection);
            return;
        }
        connection->sent += (size_t)count;
    }
}

static void start(Connection *connection, int64_t due) {
    connection->busy = 1;
    connection->due = due;
    connection->sent = connection->filled = 0;
    connection->left = -1;
    if (connection->connected) write_some(connection);
}

static int open_one(int64_t due) {
    if (!unused_count) return 0;
    Connection *connection = &connections[unused[--unused_count]];
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (connection->fd < 0) { perror("socket"); exit(1); }
    int one = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection->connected = 0;
    connects++;
    start(connection, due);
    if (connect(connection->fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
        perror("connect");
        exit(1);
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = connection};
    epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &event);
    return 1;
}

static void submit(int64_t due) {
    if (idle_count) start(idle[--idle_count], due);
    else if (!open_one(due)) {
        if (patience_ns == 0) { given_up++; return; }
        if (backlog_count == backlog_room) { failed++; return; }
        backlog[(backlog_first + backlog_count++) % backlog_room] = due;
    }
}

/* The due time of the request that has waited longest and is still wanted; 0 where there is none. */
static int64_t waiting(int64_t now) {
    while (backlog_count) {
        int64_t due = backlog[backlog_first];
        backlog_first = (backlog_first + 1) % backlog_room, backlog_count--;
        if (patience_ns < 0 || (double)(now - due) <= patience_ns) return due;
        given_up++;
    }
    return 0;
}

static void ended(Connection *connection) {
    int64_t now = now_ns(), due;
    double latency = (double)(now - connection->due);
    if (connection->status == 200) {
        add(&served, latency);
        if (latency <= slo_ns) within++;
    } else if (connection->status == 503) add(&rejected, latency);
    else other++;
    connection->busy = 0;
    if (connection->closes) {
        connection->connected = 0; /* it is not among the idle ones */
        drop(connection);
        if (closed_loop && now < stop_at) { sent++; open_one(now); }
        else if ((due = waiting(now))) open_one(due);
    } else if (closed_loop) {
        if (now < stop_at) { sent++; start(connection, now); }
    } else if ((due = waiting(now))) start(connection, due);
    else idle[idle_count++] = connection;
}

static void read_some(Connection *connection) {
    static char rest[1 << 16];
    for (;;) {
        int in_head = connection->left < 0;
        char *to = in_head ? connection->head + connection->filled : rest;
        ssize_t count = read(connection->fd, to, in_head ? HEAD - connection->filled : sizeof rest);
        if (count <= 0) {
            if (count == 0 || errno != EAGAIN) fail(connection);
            return;
        }
        if (!connection->busy) { fail(connection); return; } /* a response to nothing */
        if (in_head) {
            connection->filled += (size_t)count;
            connection->head[connection->filled] = 0;
            char *end = strstr(connection->head, "\r\n\r\n");
            char *length = strcasestr(connection->head, "\r\ncontent-length:");
            if (!end || !length) {
                if (connection->filled == HEAD) fail(connection);
                if (connection->fd < 0) return;
                continue;
            }
            connection->status = atoi(connection->head + 9);
            char *closes = strcasestr(connection->head, "\r\nconnection: close");
            connection->closes = closes && closes < end;
            connection->left = atoll(length + 17) - (connection->head + connection->filled - end - 4);
        } else connection->left -= count;
        if (connection->left <= 0) {
            ended(connection);
            if (connection->fd < 0 || !connection->connected) return;
        }
    }
}

int main(int count, char **words) {
    if (count != 9) {
        fprintf(stderr, "caller PORT FILE SLO_MS SECONDS CONNECTIONS RATE SEED PATIENCE_MS\n");
        return 2;
    }
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1])),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    FILE *file = fopen(words[2], "rb");
    if (!file) { perror(words[2]); return 1; }
    request = malloc(1 << 20);
    request_size = fread(request, 1, 1 << 20, file);
    slo_ns = atof(words[3]) * 1e6;
    double seconds = atof(words[4]);
    size_t most = (size_t)atoll(words[5]);
    double rate = atof(words[6]);
    srand48(atol(words[7]));
    patience_ns = atof(words[8]) * 1e6;
    closed_loop = rate <= 0;
    connections = calloc(most, sizeof(Connection));
    idle = calloc(most, sizeof(Connection *));
    unused = calloc(most, sizeof(int));
    for (size_t n = most; n-- > 0;) unused[unused_count++] = (int)n;
    backlog_room = 1 << 22;
    backlog = calloc(backlog_room, sizeof(int64_t));
    epoll = epoll_create1(0);

    int64_t begin = now_ns(), due = begin;
    stop_at = begin + (int64_t)(seconds * 1e9);
    if (closed_loop) {
        for (size_t n = 0; n < most; n++, sent++) open_one(now_ns());
        due = stop_at;
    } else due += (int64_t)(-log(1 - drand48()) / rate * 1e9);
    static struct epoll_event events[EVENTS];
    for (;;) {
        int64_t now = now_ns();
        for (int burst = 0; due <= now && due < stop_at && burst < 64; burst++) {
            add(&lag, (double)(now - due));
            sent++;
            submit(due);
            due += (int64_t)(-log(1 - drand48()) / rate * 1e9);
        }
        if (now >= stop_at && (sent == served.count + rejected.count + other + failed + given_up || now > stop_at + GRACE_NS)) break;
        int64_t wait = (due < stop_at ? due : now + 10000000) - now_ns();
        struct timespec timeout = {.tv_nsec = wait < 0 ? 0 : wait > 10000000 ? 10000000 : wait};
        int ready = epoll_pwait2(epoll, events, EVENTS, &timeout, NULL);
        for (int n = 0; n < ready; n++) {
            Connection *connection = events[n].data.ptr;
            if (connection->fd < 0) continue;
            if (!connection->connected) {
                if (events[n].events & (EPOLLERR | EPOLLHUP)) { fail(connection); continue; }
                connection->connected = 1;
            }
            if (connection->busy && events[n].events & EPOLLOUT) write_some(connection);
            if (connection->fd >= 0 && events[n].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_some(connection);
        }
    }
    size_t answered = served.count + rejected.count + other + failed + given_up;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"sent\":%zu,\"served\":%zu,\"within\":%zu,\"rejected\":%zu,\"other\":%zu,\"failed\":%zu,\"given_up\":%zu,\"unanswered\":%zu,"
           "\"connects\":%zu,\"served_p50\":%.3f,\"served_p99\":%.3f,\"rejected_p50\":%.3f,\"rejected_p99\":%.3f,"
           "\"rejected_max\":%.3f,\"lag_p99\":%.3f,\"cpu\":%.3f}\n",
           sent, served.count, within, rejected.count, other, failed, given_up, sent - answered, connects, quantile(&served, 0.5),
           quantile(&served, 0.99), quantile(&rejected, 0.5), quantile(&rejected, 0.99), quantile(&rejected, 1.0),
           quantile(&lag, 0.99), cpu);
    return 0;
}
