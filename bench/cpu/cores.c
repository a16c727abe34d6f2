// How long a line of memory takes from the first core to the second and back.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
static _Alignas(64) atomic_int ball;
static long turns;
static double seconds;
static void on_core(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static void *there(void *unused) {
    on_core(1);
    for (long i = 0; i < turns; i++) {
        while (atomic_load_explicit(&ball, memory_order_acquire) != 1) {}
        atomic_store_explicit(&ball, 0, memory_order_release);
    }
    return 0;
}
static void *here(void *unused) {
    on_core(0);
    double start = now();
    for (long i = 0; i < turns; i++) {
        atomic_store_explicit(&ball, 1, memory_order_release);
        while (atomic_load_explicit(&ball, memory_order_acquire) != 0) {}
    }
    seconds = now() - start;
    return 0;
}
double round_trip(long number) {
    pthread_t first, second;
    turns = number;
    pthread_create(&first, 0, there, 0);
    pthread_create(&second, 0, here, 0);
    pthread_join(first, 0);
    pthread_join(second, 0);
    return 1e9 * seconds / turns;
}
