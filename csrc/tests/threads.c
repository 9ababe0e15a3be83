/* Every task is done exactly once, and is done when the call returns: with threads that sleep, call concurrently, fork or share tasks
   within a task. */
#include "guard.h"

#include "../threads.c"

#include <string.h>
#include <sys/wait.h>

enum { TASKS = 100, ROUNDS = 2000 };

static int32_t four(uint32_t *count) { return *count = 4, 0; }

/* By then, threads that poll for tasks sleep, and so does the one that waits for the others. */
static void pause_long(void) {
    const int64_t end = now_ns() + 2 * SPIN_NS;
    while (now_ns() < end);
}

static void count(void *context, int64_t index) { ((uint8_t *)context)[index]++; }

static void count_slowly(void *context, int64_t index) {
    if (index % 40 == 39) pause_long();
    count(context, index);
}

static void share_again(void *context, int64_t index) {
    shoal_parallel(TASKS, count, (uint8_t *)context + index * TASKS);
}

/* Each of the counts is 0: of 0xff, and one more. */
static void check_counts(const uint8_t *counts, int64_t size) {
    for (int64_t i = 0; i < size; i++) CHECK(counts[i] == 0);
}

static void check_rounds(int rounds, shoal_task task) {
    uint8_t *counts = guarded(TASKS);
    for (int round = 0; round < rounds; round++) {
        const int64_t tasks = round % (TASKS + 1);
        memset(counts, 0xff, TASKS);
        if (round % 50 == 0) pause_long();
        shoal_parallel(tasks, task, counts);
        check_counts(counts, tasks);
        for (int64_t i = tasks; i < TASKS; i++) CHECK(counts[i] == 0xff);
    }
}

static void *call_meanwhile(void *unused) {
    check_rounds(ROUNDS, count);
    return unused;
}

int main(void) {
    CHECK(shoal_threads() == 1);
    check_rounds(TASKS + 1, count);
    CHECK(pool.started == 0);

    shoal_use_threads((void *)four);
    CHECK(shoal_threads() == 4);
    check_rounds(ROUNDS, count);
    check_rounds(ROUNDS / 10, count_slowly);
    CHECK(pool.started == 3);
    uint8_t *counts = guarded(TASKS * TASKS);
    shoal_parallel(TASKS, share_again, counts);
    check_counts(counts, TASKS * TASKS);

    pthread_t other;
    CHECK(!pthread_create(&other, NULL, call_meanwhile, NULL));
    check_rounds(ROUNDS, count);
    CHECK(!pthread_join(other, NULL));

    const pid_t child = fork();
    if (!child) {
        CHECK(pool.started == 0);
        check_rounds(ROUNDS, count);
        CHECK(pool.started == 3);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    check_rounds(ROUNDS, count);
    CHECK(pool.started == 3);
    return 0;
}
