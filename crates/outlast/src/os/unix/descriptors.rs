//! How many files and sockets we may have open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit to as many as are wanted, as far as that is allowed; how many there may be now. Children are started by
/// the keeper, which was born before, and have the limit that we were given.
pub fn room_for_descriptors(wanted: u64) -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return wanted };
    let more = wanted.min(hard);
    if soft < more && setrlimit(Resource::RLIMIT_NOFILE, more, hard).is_ok() { more } else { soft }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_what_was_wanted_or_all_there_can_be() {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(room_for_descriptors(1), soft, "what is there is never lowered");
        let wanted = soft.saturating_add(1);
        let room = room_for_descriptors(wanted);
        assert!(room == wanted || (room == soft && soft == hard), "{room} of {wanted}");
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap().0, room);
    }
}
