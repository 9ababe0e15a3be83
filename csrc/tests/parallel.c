/* Every task is done exactly once, where torch has no threads to lend too. */
#include "guard.h"

#include "../runtime.c"

static void count(void *context, int64_t index) { ((uint8_t *)context)[index]++; }

int main(void) {
    CHECK(shoal_threads() == 1);
    for (int64_t tasks = 0; tasks < 100; tasks += 33) {
        uint8_t *counts = guarded((size_t)tasks);
        shoal_parallel(tasks, count, counts);
        for (int64_t i = 0; i < tasks; i++) CHECK(counts[i] == 0); /* 0xff and one more */
    }
    return 0;
}
