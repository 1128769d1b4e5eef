//! Where an agent works: found anew at each start, so that a document may move.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use crate::os;

/// What makes a directory the root of a project. `.outlast/` does not: outlast creates it wherever an agent works.
const ROOT_SIGNS: [&str; 2] = ["outlast.toml", ".agent-doc"];
/// This too, except in the home directory itself: people keep their dotfiles in such a repository.
const REPOSITORY: &str = ".git";

/// Which of the ways to say it was the one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    CliFlag,
    Frontmatter,
    ProjectRoot,
    DocumentParent,
    CurrentDir,
}

impl Source {
    /// For logs and programs; it does not change.
    pub fn tag(self) -> &'static str {
        match self {
            Source::CliFlag => "cli_flag",
            Source::Frontmatter => "frontmatter",
            Source::ProjectRoot => "project_root",
            Source::DocumentParent => "document_parent",
            Source::CurrentDir => "current_dir",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::CliFlag => "`--cwd`",
            Source::Frontmatter => "the block at the top of the document",
            Source::ProjectRoot => "the project's root",
            Source::DocumentParent => "the document's directory",
            Source::CurrentDir => "the current directory",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cwd {
    pub path: PathBuf,
    pub source: Source,
}

#[derive(Debug, thiserror::Error)]
pub enum CwdError {
    #[error("{from} names the working directory `{path}`, which does not exist")]
    Missing { path: String, from: Source },
    #[error("{from} names the working directory `{path}`, which is not a directory")]
    NotADirectory { path: String, from: Source },
    #[error("{from} names the working directory `{path}`, which cannot be used")]
    Os { path: String, from: Source, source: io::Error },
    #[error("cannot find the document {path}")]
    Document { path: String, source: io::Error },
}

impl CwdError {
    pub fn hint(&self) -> Option<String> {
        match self {
            CwdError::Missing { from: Source::CliFlag, .. } => {
                Some("a relative path counts from the directory you are in".to_owned())
            }
            CwdError::Missing { from: Source::Frontmatter, .. } => {
                Some("a relative path counts from the document's own directory".to_owned())
            }
            CwdError::Document { .. } => {
                Some("the document is the word before `--`; the agent's command comes after it".to_owned())
            }
            _ => None,
        }
    }
}

/// What is known when the directory is looked for.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    pub flag: Option<&'a Path>,
    pub frontmatter: Option<&'a str>,
    pub document: Option<&'a Path>,
    /// Where outlast was started.
    pub here: &'a Path,
    /// The user's home directory.
    pub home: Option<&'a Path>,
}

/// The flag, else the document's own word, else the document's project, else the document's directory. Without a
/// document it is the current directory, as if the agent had been started by hand. A path that was named and is wrong is
/// an error: a fall-through would put an agent to work in a directory that was not meant.
pub fn resolve(wish: Wish<'_>) -> Result<Cwd, CwdError> {
    let here = wish.here;
    let parent = match wish.document {
        None => None,
        Some(document) => {
            let unfound = |source| CwdError::Document { path: document.display().to_string(), source };
            let document = os::real_path(&here.join(document)).map_err(unfound)?;
            Some(document.parent().unwrap_or(Path::new("/")).to_owned())
        }
    };
    if let Some(flag) = wish.flag {
        return check(&here.join(flag), flag, Source::CliFlag);
    }
    if let Some(said) = wish.frontmatter {
        let base = parent.as_deref().unwrap_or(here);
        return check(&base.join(said), Path::new(said), Source::Frontmatter);
    }
    let Some(parent) = parent else { return check(here, here, Source::CurrentDir) };
    let home = wish.home.and_then(|home| os::real_path(home).ok());
    match parent.ancestors().find(|dir| is_root(dir, home.as_deref())) {
        Some(root) => check(root, root, Source::ProjectRoot),
        None => check(&parent, &parent, Source::DocumentParent),
    }
}

fn is_root(dir: &Path, home: Option<&Path>) -> bool {
    ROOT_SIGNS.iter().any(|sign| dir.join(sign).exists()) || (Some(dir) != home && dir.join(REPOSITORY).exists())
}

fn check(path: &Path, said: &Path, from: Source) -> Result<Cwd, CwdError> {
    let said = said.display().to_string();
    let found = os::real_path(path).and_then(|path| Ok((fs::metadata(&path)?, path)));
    match found {
        Ok((metadata, path)) if metadata.is_dir() => Ok(Cwd { path, source: from }),
        Ok(_) => Err(CwdError::NotADirectory { path: said, from }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CwdError::Missing { path: said, from }),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(CwdError::NotADirectory { path: said, from }),
        Err(source) => Err(CwdError::Os { path: said, from, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `root/.git`, `root/docs/plan.md`, `root/docs/deep/down`, `loose/plan.md` outside of any project, and a home
    /// directory that is a repository, with a project in it.
    struct World {
        _dir: tempfile::TempDir,
        base: PathBuf,
    }

    impl World {
        fn new() -> World {
            let dir = tempfile::tempdir().unwrap();
            let base = os::real_path(dir.path()).unwrap();
            for dir in [
                "root/.git",
                "root/docs/deep/down/.outlast",
                "loose/.outlast",
                "home/.git",
                "home/notes",
                "home/app/.git",
            ] {
                fs::create_dir_all(base.join(dir)).unwrap();
            }
            let files = ["root/docs/plan.md", "root/docs/deep/down/plan.md", "loose/plan.md", "home/notes/plan.md"];
            for file in files.into_iter().chain(["home/app/plan.md"]) {
                fs::write(base.join(file), "").unwrap();
            }
            World { _dir: dir, base }
        }

        fn resolve(
            &self,
            flag: &str,
            said: &str,
            document: &str,
            here: &str,
        ) -> Result<(String, &'static str), CwdError> {
            fn some(text: &str) -> Option<&str> {
                Some(text).filter(|text| !text.is_empty())
            }
            let here = self.base.join(here);
            let wish = Wish {
                flag: some(flag).map(Path::new),
                frontmatter: some(said),
                document: some(document).map(Path::new),
                here: &here,
                home: Some(&self.base.join("home")),
            };
            resolve(wish).map(|cwd| {
                let path = cwd.path.strip_prefix(&self.base).unwrap().display().to_string().replace('\\', "/");
                (path, cwd.source.tag())
            })
        }
    }

    #[test]
    fn the_directory_is_found_in_this_order() {
        let world = World::new();
        #[rustfmt::skip]
        let table = [
            // --cwd   frontmatter  document                  started in   directory    source
            ("docs",   "..",        "docs/plan.md",           "root",      "root/docs", "cli_flag"),
            ("..",     "",          "plan.md",                "root/docs", "root",      "cli_flag"),
            ("",       "deep",      "root/docs/plan.md",      "",          "root/docs/deep", "frontmatter"),
            ("",       "..",        "docs/plan.md",           "root",      "root",      "frontmatter"),
            ("",       "",          "docs/plan.md",           "root",      "root",      "project_root"),
            ("",       "",          "deep/down/plan.md",      "root/docs", "root",      "project_root"),
            ("",       "",          "",                       "root/docs", "root/docs", "current_dir"),
            ("",       "",          "",                       "root",      "root",      "current_dir"),
            ("..",     "",          "",                       "root/docs", "root",      "cli_flag"),
            ("",       "",          "notes/plan.md",          "home",      "home/notes", "document_parent"),
            ("",       "",          "app/plan.md",            "home",      "home/app",  "project_root"),
            ("",       "",          "../loose/plan.md",       "root",      "loose",     "document_parent"),
            ("",       "",          "",                       "loose",     "loose",     "current_dir"),
        ];
        for (flag, said, document, here, path, source) in table {
            let found = world.resolve(flag, said, document, here).unwrap();
            assert_eq!(found, (path.to_owned(), source), "{flag} {said} {document} {here}");
        }
    }

    #[test]
    fn the_tags_are_a_promise() {
        use Source::*;
        let tags = [CliFlag, Frontmatter, ProjectRoot, DocumentParent, CurrentDir].map(Source::tag);
        assert_eq!(tags, ["cli_flag", "frontmatter", "project_root", "document_parent", "current_dir"]);
    }

    // Among them are words of the system's own.
    #[cfg(unix)]
    #[test]
    fn what_is_wrong_is_said_with_its_source_and_never_passed_over() {
        let world = World::new();
        let mut words = String::new();
        for (flag, said, document) in [
            ("nowhere", "..", "docs/plan.md"),
            ("docs/plan.md", "", ""),
            ("docs/plan.md/x", "", ""),
            ("", "nowhere", "docs/plan.md"),
            ("", "plan.md", "docs/plan.md"),
            ("docs", "", "docs/none.md"),
        ] {
            let error = world.resolve(flag, said, document, "root").unwrap_err();
            words.push_str(&crate::report::Report::of(&error, error.hint(), 2).to_string());
        }
        insta::assert_snapshot!(words, @"
        error: `--cwd` names the working directory `nowhere`, which does not exist
          hint: a relative path counts from the directory you are in
        error: `--cwd` names the working directory `docs/plan.md`, which is not a directory
        error: `--cwd` names the working directory `docs/plan.md/x`, which is not a directory
        error: the block at the top of the document names the working directory `nowhere`, which does not exist
          hint: a relative path counts from the document's own directory
        error: the block at the top of the document names the working directory `plan.md`, which is not a directory
        error: cannot find the document docs/none.md
          because: no such file or directory
          hint: the document is the word before `--`; the agent's command comes after it
        ");
    }
}
