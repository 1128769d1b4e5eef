/* What outlast.h promises, asked of a session that runs: client ID SOCKET. The first promise that is broken ends it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "outlast.h"

#define PATIENCE 20000

#define PROVE(promise)                                                                                                 \
    do {                                                                                                               \
        if (!(promise)) {                                                                                              \
            fprintf(stderr, "%s:%d: not so: %s\n  last error: %s\n", __FILE__, __LINE__, #promise,                     \
                outlast_last_error());                                                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static int has(const char *text, const char *part) { return text != NULL && strstr(text, part) != NULL; }

/* Bad input is a status and words, and never more. */
static void prove_bad_input(outlast_client *client, const char *id) {
    outlast_client *other = (outlast_client *)&other;
    char *json = (char *)&json;
    char deep[300] = "";

    PROVE(outlast_connect(NULL, PATIENCE, &other) == OUTLAST_BAD_ARGUMENT);
    PROVE(other == NULL);
    PROVE(has(outlast_last_error(), "`which` is NULL"));
    PROVE(strcmp(outlast_last_code(), "") == 0);
    PROVE(outlast_connect(id, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_connect("\xff", PATIENCE, &other) == OUTLAST_BAD_ARGUMENT);
    PROVE(has(outlast_last_error(), "not UTF-8"));
    PROVE(outlast_connect("sessionx", PATIENCE, &other) == OUTLAST_NOT_FOUND);
    PROVE(has(outlast_last_error(), "no instance named `sessionx` is running\ndid you mean `session-c`?"));
    PROVE(outlast_connect("/nowhere/at.sock", PATIENCE, &other) == OUTLAST_UNREACHABLE);
    PROVE(other == NULL);
    PROVE(has(outlast_last_error(), "no process listens at /nowhere/at.sock"));

    memset(deep, 'a', sizeof deep - 1);
    deep[0] = '/';
    PROVE(outlast_connect(deep, PATIENCE, &other) == OUTLAST_UNREACHABLE); /* No socket has such a long path. */

    PROVE(outlast_state(NULL, PATIENCE, &json) == OUTLAST_BAD_ARGUMENT);
    PROVE(json == NULL);
    PROVE(outlast_state(client, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_restart(NULL, OUTLAST_FRESH, NULL, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_restart(client, 7, NULL, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);
    PROVE(has(outlast_last_error(), "there is no mode 7"));
    PROVE(outlast_inject(NULL, NULL, 0, PATIENCE) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_inject(client, NULL, 1, PATIENCE) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_inject(client, (const uint8_t *)"", SIZE_MAX, PATIENCE) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_stop(NULL, 0, PATIENCE) == OUTLAST_BAD_ARGUMENT);
    outlast_free(NULL);
    outlast_free_text(NULL);
    PROVE(strcmp(outlast_last_error(), "") == 0);
}

/* The test sees to it that something has happened, and presses Enter. */
static void wait_until(const char *what) {
    puts(what);
    fflush(stdout);
    PROVE(getchar() == '\n');
}

static void *ask_often(void *client) {
    int round;
    for (round = 0; round < 50; round++) {
        char *json = NULL;
        PROVE(outlast_state(client, PATIENCE, &json) == OUTLAST_OK);
        PROVE(has(json, "\"kind\":\"session\""));
        outlast_free_text(json);
    }
    /* What another thread did wrong is not told here. */
    PROVE(strcmp(outlast_last_error(), "") == 0);
    return NULL;
}

static void prove_threads(outlast_client *client) {
    pthread_t threads[4];
    int each;
    PROVE(outlast_state(NULL, 0, NULL) == OUTLAST_BAD_ARGUMENT);
    for (each = 0; each < 4; each++) {
        PROVE(pthread_create(&threads[each], NULL, ask_often, client) == 0);
    }
    for (each = 0; each < 4; each++) {
        PROVE(pthread_join(threads[each], NULL) == 0);
    }
}

int main(int argc, char **argv) {
    outlast_client *client = NULL, *by_socket = NULL;
    char *json = NULL;
    const char *typed = "note from C\r";

    PROVE(argc == 3);
    PROVE(outlast_api_version() == OUTLAST_API_VERSION);
    PROVE(outlast_connect("session", PATIENCE, &client) == OUTLAST_OK); /* The beginning of its id. */
    PROVE(outlast_connect(argv[2], PATIENCE, &by_socket) == OUTLAST_OK);
    prove_bad_input(client, argv[1]);
    prove_threads(client);

    PROVE(outlast_state(client, PATIENCE, &json) == OUTLAST_OK);
    PROVE(has(json, "\"id\":\"session-c\"") && has(json, "\"restarts\":0"));
    outlast_free_text(json);
    /* The answer comes after the timeout; it is not used as the answer to the next request. */
    wait_until("frozen");
    PROVE(outlast_state(client, 50, &json) == OUTLAST_TIMED_OUT);
    PROVE(json == NULL);
    wait_until("thawed");
    PROVE(outlast_inject(client, (const uint8_t *)typed, strlen(typed), PATIENCE) == OUTLAST_OK);
    PROVE(outlast_inject(client, NULL, 0, PATIENCE) == OUTLAST_OK);
    wait_until("typed");
    PROVE(outlast_send(client, "sent from C", 1, PATIENCE, &json) == OUTLAST_OK);
    PROVE(has(json, "\"result\":\"unproven\"") && has(json, "\"presses\":1"));
    outlast_free_text(json);
    PROVE(outlast_send(client, "two\nlines", 1, 100, &json) == OUTLAST_REFUSED);
    PROVE(json == NULL && strcmp(outlast_last_code(), "no_paste") == 0);
    PROVE(outlast_send(client, "", 1, PATIENCE, NULL) == OUTLAST_REFUSED);
    PROVE(outlast_send(client, NULL, 1, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);
    PROVE(outlast_send(NULL, "x", 1, PATIENCE, NULL) == OUTLAST_BAD_ARGUMENT);

    PROVE(outlast_restart(by_socket, OUTLAST_FRESH, "C asks", PATIENCE, &json) == OUTLAST_OK);
    PROVE(has(json, "\"mode\":\"fresh\"") && has(json, "\"new_pid\":"));
    outlast_free_text(json);
    PROVE(outlast_restart(client, OUTLAST_CONTINUE, NULL, PATIENCE, NULL) == OUTLAST_OK);
    PROVE(outlast_state(client, PATIENCE, &json) == OUTLAST_OK);
    PROVE(has(json, "\"restarts\":2"));
    outlast_free_text(json);

    /* Then it will not be typed to. */
    wait_until("halted");
    PROVE(outlast_inject(client, (const uint8_t *)typed, strlen(typed), PATIENCE) == OUTLAST_REFUSED);
    PROVE(strcmp(outlast_last_code(), "halted") == 0);
    PROVE(outlast_restart(client, OUTLAST_CONTINUE, NULL, PATIENCE, &json) == OUTLAST_REFUSED);
    PROVE(json == NULL && strcmp(outlast_last_code(), "halted") == 0);

    PROVE(outlast_stop(client, 0, PATIENCE) == OUTLAST_OK);
    PROVE(outlast_state(client, PATIENCE, &json) == OUTLAST_UNREACHABLE);
    /* The other end is gone while this one still thinks it is there: an error, and no signal. */
    PROVE(outlast_inject(by_socket, (const uint8_t *)typed, strlen(typed), PATIENCE) == OUTLAST_UNREACHABLE);
    PROVE(outlast_inject(by_socket, (const uint8_t *)typed, strlen(typed), PATIENCE) == OUTLAST_UNREACHABLE);
    PROVE(has(outlast_last_error(), "connect again"));
    outlast_free(client);
    outlast_free(by_socket);
    PROVE(outlast_connect(argv[1], PATIENCE, &client) == OUTLAST_NOT_FOUND);
    PROVE(outlast_connect(argv[2], PATIENCE, &client) == OUTLAST_UNREACHABLE);
    PROVE(client == NULL);
    puts("proved");
    return 0;
}
