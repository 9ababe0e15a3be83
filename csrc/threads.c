/* Thread pool: sharing the tasks of a kernel between threads.

   The calling thread runs tasks until none is left, and the pool's threads help it. Then it waits only for threads
   that are running a task: a thread that is descheduled or still sleeping does not delay it. */
#define _GNU_SOURCE
#include "shoal.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 50000 };       /* to poll for tasks before sleeping, as waking up takes as long */
enum { STACK_BYTES = 8 << 20 }; /* attention keeps its working memory there */

/* Flags in pool.inside, above the number of threads inside. */
#define OPEN (1u << 31)   /* there are tasks, and threads that enter are waited for */
#define SLEEPS (1u << 30) /* the calling thread sleeps until no thread is inside */

/* As in torch/csrc/stable/c/shim.h; 0 is success. */
typedef int32_t (*num_threads_fn)(uint32_t *);

static num_threads_fn num_threads;

/* Words that threads wait for or change are in separate cache lines. */
static struct {
    _Alignas(64) atomic_uint round; /* goes up when there are tasks */
    atomic_uint sleeping;           /* threads that wait for that asleep */
    _Alignas(64) atomic_uint inside; /* threads that may be within a task; OPEN and SLEEPS */
    _Alignas(64) atomic_llong next; /* the next task */
    atomic_llong came;              /* threads that came to help */
    /* Whose tasks they are: what those inside read that came while it was OPEN. */
    _Alignas(64) shoal_task task;
    void *context;
    int64_t count, helpers;
    int64_t started;   /* threads of the pool */
    int refused;       /* the system gives no more */
    atomic_flag taken; /* a thread is sharing tasks; other callers run their tasks alone meanwhile */
} pool = {.taken = ATOMIC_FLAG_INIT};

/* Share tasks between as many threads as torch would; without its function all is done by the thread that calls. */
void shoal_use_threads(void *torch_get_num_threads) { num_threads = (num_threads_fn)torch_get_num_threads; }

int64_t shoal_threads(void) {
    uint32_t count = 1;
    if (num_threads && num_threads(&count)) count = 1;
    return count;
}

static void sleep_while(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word, int64_t threads) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, (int)threads, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Poll for a while whether a word is, or is no longer, a value; returns whether that is so. */
static int spin(atomic_uint *word, unsigned value, int until_equal) {
    const int64_t end = now_ns() + SPIN_NS;
    do
        for (int i = 0; i < 16; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == until_equal) return 1;
            __builtin_ia32_pause();
        }
    while (now_ns() < end);
    return 0;
}

static void take_tasks(void) {
    int64_t index;
    while ((index = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed)) < pool.count)
        pool.task(pool.context, index);
}

/* Wait for a round after the one that was seen; returns its number. */
static unsigned next_round(unsigned seen) {
    if (!spin(&pool.round, seen, 0)) {
        atomic_fetch_add(&pool.sleeping, 1);
        while (atomic_load(&pool.round) == seen) sleep_while(&pool.round, seen);
        atomic_fetch_sub(&pool.sleeping, 1);
    }
    return atomic_load(&pool.round);
}

/* What a thread of the pool does. */
static void *help(void *unused) {
    for (unsigned round = 0;;) {
        round = next_round(round);
        /* Threads that are counted while it is open are waited for, so that the tasks stay valid. */
        if ((atomic_fetch_add(&pool.inside, 1) & OPEN) && atomic_fetch_add(&pool.came, 1) < pool.helpers) take_tasks();
        if (atomic_fetch_sub(&pool.inside, 1) == (SLEEPS | 1)) wake(&pool.inside, 1);
    }
    return unused;
}

/* In a child process there are no threads but the one that forked. */
static void forget_threads(void) {
    pool.started = pool.refused = 0;
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.inside, 0);
    atomic_flag_clear(&pool.taken);
}

/* Start this many threads, or as many as the system allows. They get no signals, which are for the program's own, but those
   of their own faults. */
static void start_threads(int64_t wanted) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    if (pool.started >= wanted || pool.refused) return;
    static int prepared;
    if (!prepared) prepared = !pthread_atfork(NULL, NULL, forget_threads);
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigset_t all, before;
    sigfillset(&all);
    for (int i = 0; i < 5; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.started < wanted && !pthread_create(&thread, &attributes, help, NULL)) pool.started++;
    pool.refused = pool.started < wanted;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Keep threads from beginning, and wait for those that have. */
static void close_round(void) {
    atomic_fetch_and(&pool.inside, ~OPEN);
    if (spin(&pool.inside, 0, 1)) return;
    unsigned inside;
    while ((inside = atomic_load(&pool.inside)) & ~SLEEPS)
        if (atomic_compare_exchange_strong(&pool.inside, &inside, inside | SLEEPS))
            sleep_while(&pool.inside, inside | SLEEPS);
    atomic_fetch_and(&pool.inside, ~SLEEPS);
}

void shoal_parallel(int64_t count, shoal_task task, void *context) {
    int64_t helpers = shoal_threads() - 1;
    if (helpers >= count) helpers = count - 1;
    if (helpers < 1 || atomic_flag_test_and_set(&pool.taken)) {
        for (int64_t index = 0; index < count; index++) task(context, index);
        return;
    }
    start_threads(helpers);
    pool.task = task, pool.context = context, pool.count = count, pool.helpers = helpers;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.came, 0);
    atomic_fetch_or(&pool.inside, OPEN);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleeping)) wake(&pool.round, helpers);
    take_tasks();
    close_round();
    atomic_flag_clear(&pool.taken);
}
