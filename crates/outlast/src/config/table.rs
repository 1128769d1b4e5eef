//! What all tables of `outlast.toml` have in common. [`tables`] makes a type of a list of keys: its values know their
//! positions, and one description of a key is read, merged, shown, guarded and documented.

use std::{
    mem::take,
    ops::{Deref, DerefMut},
};

use serde_json::Value as Json;

use super::{
    mistake::{Mistakes, Spot, did_you_mean},
    reference::References,
    show::Setting,
    tree::{self, Entry, Node, Value as Tree},
};

/// One key of a table, as data.
#[derive(Debug)]
pub(crate) struct Key {
    pub name: &'static str,
    pub shape: Shape,
    /// As it is written in the file; empty if there is none.
    pub default: &'static str,
    /// One or two sentences for the reference page and the schema.
    pub about: &'static str,
    pub guard: Guard,
    #[cfg(test)]
    pub marks: &'static [&'static str],
    pub kind: fn() -> (String, Json),
}

/// Whether a file that outlast found may set a key before the user trusts it (SPEC X1). In addition, no key of such a
/// file may refer to the environment by `${NAME}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guard {
    Never,
    /// It runs a command, passes on the environment, connects to an address or opens a listener.
    Always,
    /// It is a path, which is harmless inside the directory of the file.
    Outside,
}

/// How the tables below a key are written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shape {
    /// It is a value.
    Leaf,
    /// `[name]`
    Table(&'static [Key]),
    /// `[name.NAME]`, in the order of the file.
    Named(&'static [Key]),
    /// `[[name]]`
    Many(&'static [Key]),
}

impl Shape {
    /// The keys of the tables below it.
    pub(crate) const fn keys(self) -> &'static [Key] {
        match self {
            Shape::Leaf => &[],
            Shape::Table(keys) | Shape::Named(keys) | Shape::Many(keys) => keys,
        }
    }

    pub(crate) fn is_leaf(self) -> bool {
        matches!(self, Shape::Leaf)
    }
}

/// The type of a key.
pub(crate) trait Value: Sized {
    const SHAPE: Shape = Shape::Leaf;

    /// `spot` is the key, `node` its value. `None` if the value cannot be used, which was reported.
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Self>;

    /// Its values in the words of the reference page, and their schema.
    fn kind() -> (String, Json);

    /// As it can be written in the file.
    fn shown(&self, node: &Node) -> Json {
        node.json()
    }

    /// Adds its lines of `config show`. A value that is not a table has one, `line`.
    fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
        out.push(line);
    }

    /// The value of a later file overrides.
    fn merge(&mut self, later: Self) {
        *self = later;
    }
}

/// The value of a key, which is the default if no file and no option sets it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Set<T> {
    /// The position of the key, or of its table if it is not set.
    pub spot: Spot,
    pub is_set: bool,
    /// `None` if it is not set and has no default.
    shown: Option<Json>,
    /// The environment variables that it refers to.
    variables: Vec<String>,
    value: T,
}

impl<T> Deref for Set<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Set<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Value> Set<T> {
    /// A default, which is read like a value of the file.
    pub(crate) fn default_of(text: &str) -> Set<T> {
        let mut reader = Reader { references: None, mistakes: &mut Mistakes::default(), variables: vec![] };
        let set = Set::read(&mut reader, Spot::default(), &tree::default(text)).expect("a default can be read");
        Set { is_set: false, ..set }
    }

    pub(crate) fn read(reader: &mut Reader<'_>, spot: Spot, node: &Node) -> Option<Set<T>> {
        let value = T::read(reader, &spot, node);
        let variables = take(&mut reader.variables);
        value.map(|value| Set { is_set: true, shown: Some(value.shown(node)), variables, spot, value })
    }

    pub(crate) fn merge(&mut self, later: Set<T>) {
        match (self.is_set, later.is_set) {
            (true, true) if !T::SHAPE.is_leaf() => self.value.merge(later.value),
            (_, true) => *self = later,
            (_, false) => {}
        }
    }
}

/// A value of any type.
pub(crate) trait Field {
    fn spot(&self) -> &Spot;
    fn is_set(&self) -> bool;
    /// The position of its table, until it is set.
    fn place(&mut self, spot: Spot);
    /// False if the value cannot be used; then it is not set.
    fn put(&mut self, reader: &mut Reader<'_>, spot: Spot, node: &Node) -> bool;
    fn lines(&self, path: String, out: &mut Vec<Setting>);
}

impl<T: Value> Field for Set<T> {
    fn spot(&self) -> &Spot {
        &self.spot
    }

    fn is_set(&self) -> bool {
        self.is_set
    }

    fn place(&mut self, spot: Spot) {
        self.spot = spot;
    }

    fn put(&mut self, reader: &mut Reader<'_>, spot: Spot, node: &Node) -> bool {
        Set::read(reader, spot, node).map(|set| *self = set).is_some()
    }

    fn lines(&self, path: String, out: &mut Vec<Setting>) {
        let at = self.spot.at.as_ref().filter(|_| self.is_set);
        self.value.lines(Setting::new(path, self.shown.clone(), at, self.variables.clone()), out);
    }
}

/// The position of a table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Head {
    pub spot: Spot,
    /// A part of it could not be read, so missing keys are not reported.
    pub is_broken: bool,
}

/// A table of any type.
pub(crate) trait Table {
    fn head(&mut self) -> &mut Head;
    fn fields(&self) -> Vec<(&'static Key, &dyn Field)>;
    fn fields_mut(&mut self) -> Vec<(&'static Key, &mut dyn Field)>;
}

/// Makes a type of each list of keys: `name: Type = default | mark`, after the sentences of the reference page.
/// `["key"]` after a name is the key, if that is a keyword of Rust. The marks are `guarded` and `outside` ([`Guard`]), and
/// `option` for a key that sets the option of this name in the arguments of a command, `Table (Arguments)`.
macro_rules! tables {
    ($($table:ident $(($arguments:ty))? {
        $($(#[doc = $about:literal])+ $name:ident $([$key:literal])?: $type:ty $(= $default:tt)? $(| $mark:ident)*,)+
    })+) => { $(
        #[derive(Debug, Clone)]
        pub(crate) struct $table {
            pub head: Head,
            $(pub $name: Set<$type>,)+
        }

        impl $table {
            pub(crate) const KEYS: &'static [Key] = &[$(Key {
                name: tables!(@first $($key,)? stringify!($name)),
                shape: <$type as Value>::SHAPE,
                default: concat!($(stringify!($default))?),
                about: concat!($($about),+).trim_ascii_start(),
                guard: tables!(@guard $($mark)*),
                #[cfg(test)]
                marks: &[$(stringify!($mark)),*],
                kind: <$type as Value>::kind,
            },)+];
        }

        impl Default for $table {
            fn default() -> $table {
                thread_local!(static EMPTY: $table = $table {
                    head: Head::default(),
                    $($name: tables!(@first $(Set::default_of(stringify!($default)),)? Set::default()),)+
                });
                EMPTY.with(Clone::clone)
            }
        }

        impl Table for $table {
            fn head(&mut self) -> &mut Head {
                &mut self.head
            }

            fn fields(&self) -> Vec<(&'static Key, &dyn Field)> {
                $table::KEYS.iter().zip([$(&self.$name as &dyn Field),+]).collect()
            }

            fn fields_mut(&mut self) -> Vec<(&'static Key, &mut dyn Field)> {
                $table::KEYS.iter().zip([$(&mut self.$name as &mut dyn Field),+]).collect()
            }
        }

        impl Value for $table {
            const SHAPE: Shape = Shape::Table($table::KEYS);

            fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<$table> {
                Some(reader.table(&spot.key, node))
            }

            fn kind() -> (String, Json) {
                (String::new(), schema::table($table::KEYS))
            }

            fn shown(&self, _: &Node) -> Json {
                Json::Null
            }

            fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
                show::table_lines(self, &line.key, out);
            }

            fn merge(&mut self, later: $table) {
                self.head.is_broken |= later.head.is_broken;
                self.head.spot = later.head.spot;
                $(self.$name.merge(later.$name);)+
            }
        }

        tables!(@fill $table ($($arguments)?) $($name($($mark)*))+);
    )+ };
    (@first $first:expr $(, $rest:expr)?) => { $first };
    (@guard) => { Guard::Never };
    (@guard guarded $($mark:ident)*) => { Guard::Always };
    (@guard outside $($mark:ident)*) => { Guard::Outside };
    (@guard option) => { Guard::Never };
    (@fill $table:ident () $($name:ident($($mark:ident)*))+) => {};
    (@fill $table:ident ($arguments:ty) $($name:ident($($mark:ident)*))+) => {
        impl $table {
            /// Completes the arguments of a command with the values of the file, except for the keys that are left out.
            /// Options on the command line override the file.
            pub(crate) fn fill(&self, arguments: &mut $arguments, given: &ArgMatches, is_left_out: impl Fn(&str) -> bool) {
                $($(tables!(@$mark self arguments given is_left_out $name);)*)+
            }
        }
    };
    (@option $file:ident $arguments:ident $given:ident $is_left_out:ident $name:ident) => {
        let name = stringify!($name);
        if $file.$name.is_set && !is_given($given, name) && !$is_left_out(name) {
            $arguments.$name = $file.$name.plain();
        }
    };
    (@guarded $($rest:ident)+) => {};
    (@outside $($rest:ident)+) => {};
}
pub(crate) use tables;

/// Reads trees and collects errors in `mistakes`.
pub(crate) struct Reader<'a> {
    /// `None` for options and defaults, in which nothing is replaced.
    pub references: Option<&'a References<'a>>,
    pub mistakes: &'a mut Mistakes,
    /// The environment variables that the current value refers to.
    pub variables: Vec<String>,
}

impl Reader<'_> {
    /// `path` is the full path of the table; empty for the file itself.
    pub(crate) fn table<T: Table + Default>(&mut self, path: &str, node: &Node) -> T {
        let mut table = T::default();
        let spot = |name: &str, at: &tree::Position| Spot { key: join(path, name), at: Some(at.clone()) };
        *table.head() = Head { spot: Spot { key: path.to_owned(), at: Some(node.at.clone()) }, is_broken: true };
        let Tree::Table(entries) = &node.value else {
            self.expected::<()>(&table.head().spot.clone(), node, "a table");
            return table;
        };
        let mut is_broken = false;
        let mut fields = table.fields_mut();
        fields.iter_mut().for_each(|(key, field)| field.place(spot(key.name, &node.at)));
        for entry in entries {
            let spot = spot(&entry.name, &entry.at);
            match fields.iter_mut().find(|(key, _)| key.name == entry.name) {
                None => {
                    self.unknown(path, &spot, entry, fields.iter().map(|(key, _)| key.name));
                    is_broken = true;
                }
                Some((_, field)) if field.is_set() => self.mistakes.wrong(&spot, "it is set twice", ""),
                Some((_, field)) => is_broken |= !field.put(self, spot, &entry.node),
            }
        }
        table.head().is_broken = is_broken;
        table
    }

    fn unknown<'n>(&mut self, path: &str, spot: &Spot, entry: &Entry, known: impl Iterator<Item = &'n str> + Clone) {
        let place = if path.is_empty() { "at the top of the file".to_owned() } else { format!("in `{path}`") };
        let hint = moved(path, &entry.name).map_or_else(|| did_you_mean(&entry.name, known), str::to_owned);
        self.mistakes.wrong(spot, format!("there is no such key {place}"), hint);
    }

    /// An error of a value.
    pub(crate) fn wrong<T>(
        &mut self,
        spot: &Spot,
        node: &Node,
        what: impl Into<String>,
        hint: impl Into<String>,
    ) -> Option<T> {
        self.mistakes.wrong(&spot.of(node), what, hint);
        None
    }

    /// A value of another type.
    pub(crate) fn expected<T>(&mut self, spot: &Spot, node: &Node, wanted: &str) -> Option<T> {
        self.wrong(spot, node, format!("expected {wanted}, not {}", node.value.what()), "")
    }
}

pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Keys that people look for under another name.
fn moved(path: &str, name: &str) -> Option<&'static str> {
    let root = path.split('.').next().unwrap_or_default();
    match (root, name) {
        ("auth", "secret" | "jwt_secret" | "hs256_secret") => {
            Some("do not put a secret into a file: name the variable that holds it with `secret_env`")
        }
        ("auth", "api_key" | "token" | "value") if path.starts_with("auth.key") => {
            Some("do not put a key into a file: `outlast gateway hash-key` creates its `sha256`")
        }
        ("", "backends" | "server" | "servers" | "mcpServers" | "mcp_servers") => Some("did you mean `[[backend]]`?"),
        ("backend", "environment") => Some("did you mean `env`?"),
        ("backend", "timeout") => Some("did you mean `call_timeout`?"),
        ("backend", "tools" | "include") => Some("did you mean `allow`?"),
        ("backend", "exclude") => Some("did you mean `deny`?"),
        ("backend", "enabled") => Some("did you mean `disabled`?"),
        _ => None,
    }
}
